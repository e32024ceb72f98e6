"""What `roll check` says of settings that work and may not do what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from roll.cli import app
from roll.config import load_config
from roll.config.checks.notices import notices

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "examples/rlvr_quickstart/run.yaml"


def told(*overrides: str) -> list[str]:
    return notices(load_config(QUICKSTART, overrides).config)


def test_the_examples_give_nothing_to_notice() -> None:
    for path in ROOT.glob("examples/*/*.yaml"):
        assert notices(load_config(path).config) == []


@pytest.mark.parametrize("preset", ["gspo", "gmpo", "cispo", "topr"])
def test_a_loss_about_the_ratio_needs_updates_or_the_engines_log_probs(preset: str) -> None:
    named = f"algorithm.preset={preset}"
    (notice,) = told(named)
    assert notice.startswith(f"algorithm.loss.0: {preset} is about the ratio")
    assert "actor_train.samples_per_update=128 for 4 updates of the 512 samples" in notice
    assert told(named, "actor_train.samples_per_update=128") == []
    assert told(named, "actor_train.epochs=2") == []
    assert told(named, "algorithm.old_logprobs=rollout") == []
    assert len(told(named, "algorithm.old_logprobs=recompute")) == 1


@pytest.mark.parametrize("prompts", [1, 3, 7, 10])
def test_the_number_of_samples_that_is_suggested_is_taken(prompts: int) -> None:
    beside = ["algorithm.preset=gspo", f"data.prompts_per_step={prompts}", "pools.all=0-3"]
    beside += ["cluster.devices_per_node=4"]
    (notice,) = told(*beside)
    suggested = notice.partition("samples_per_update=")[2].split()[0]
    assert told(*beside, f"actor_train.samples_per_update={suggested}") == []


def test_stale_samples_that_nothing_corrects_are_told() -> None:
    stale = "rollout.max_staleness=2"
    for way in ("auto", "recompute"):
        (notice,) = told(stale, f"algorithm.old_logprobs={way}")
        assert notice.startswith("rollout.max_staleness: samples are up to 2 step(s) older")
        assert "set algorithm.old_logprobs=rollout, or algorithm.correction=" in notice
    assert len(told(stale, "actor_train.samples_per_update=128")) == 1
    assert told(stale, "algorithm.old_logprobs=rollout") == []
    assert told(stale, "algorithm.correction={weight: {level: token, upper: 2.0}}") == []
    assert told("rollout.max_staleness=0") == []


@pytest.mark.parametrize("way", ["auto", "rollout"])
def test_a_loss_without_a_ratio_is_told_to_correct(way: str) -> None:
    overrides = ["rollout.max_staleness=1", "algorithm.preset=rloo"]
    (notice,) = told(*overrides, f"algorithm.old_logprobs={way}")
    assert "pg has no ratio" in notice
    advised = notice.rpartition("set ")[2].split(" and ")
    assert told(*overrides, f"algorithm.old_logprobs={way}", *advised) == []


@pytest.mark.parametrize("preset", ["grpo", "gspo"])
def test_a_correction_that_is_advised_is_taken(preset: str) -> None:
    overrides = ["rollout.max_staleness=1", f"algorithm.preset={preset}"]
    overrides += ["actor_train.samples_per_update=128"]
    (notice,) = told(*overrides)
    assert told(*overrides, notice.rpartition(", or ")[2]) == []


@pytest.mark.parametrize("cut", ["top_p=0.9", "top_k=20"])
def test_a_cut_distribution_beside_the_engines_log_probs_is_told(cut: str) -> None:
    sampling = f"sampling.{cut}"
    assert told(sampling) == []
    (notice,) = told(sampling, "algorithm.old_logprobs=rollout")
    assert notice.startswith(f"sampling.{cut.split('=')[0]}: with {cut} the engine's log-probs")
    (notice,) = told(sampling, "algorithm.correction={weight: {level: token, upper: 2.0}}")
    assert "algorithm.correction takes" in notice
    (notice,) = told(sampling, "algorithm.preset=ppo")
    assert "algorithm.kl_in_reward takes" in notice
    assert told(sampling, "algorithm.preset=ppo", "algorithm.old_logprobs=recompute") == []


def test_the_check_prints_it() -> None:
    result = CliRunner().invoke(app, ["check", str(QUICKSTART), "algorithm.preset=gspo"])
    assert "note: algorithm.loss.0: gspo is about the ratio" in result.output


def test_a_cut_distribution_beside_a_teacher_is_told() -> None:
    path = ROOT / "examples/distill_sort/on_policy.yaml"

    def about(*overrides: str) -> list[str]:
        taught = ["algorithm.advantage={kind: distill}", "algorithm.loss=[{kind: pg}]"]
        return notices(load_config(path, [*taught, *overrides]).config)

    (notice,) = about("sampling.top_p=0.9")
    assert "algorithm.advantage (distill) takes the difference" in notice
    assert about("sampling.top_p=0.9", "algorithm.old_logprobs=recompute") == []
    assert about("sampling.top_p=0.9", "actor_train.epochs=2") == []
    own = "domains.sort={sampling: {top_k: 5}, advantage: {kind: distill, coef: 0.5}}"
    (notice,) = about(own)
    assert notice.startswith("domains.sort.sampling.top_k: with top_k=5")
    assert "domains.sort.advantage (distill) takes the difference" in notice
    inherited = "domains.sort={advantage: {kind: distill, coef: 0.5}}"
    (notice,) = about("sampling.top_p=0.9", inherited)
    assert "algorithm.advantage (distill) and domains.sort.advantage (distill) takes" in notice
