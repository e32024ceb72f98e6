"""Every preset, a critic and combinations of parts, end to end on a tiny model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3ForCausalLM

from roll.config import RlvrConfig, load_config
from roll.config.errors import ConfigError
from roll.config.loading.compose import PRESETS
from tests.runs import run_local, without_times, write_task
from tests.tiny import save_tiny_model
from tests.unit.config.test_presets import FOR_EPISODES

BESIDE = {"vapo": ["critic.warmup_steps=1"], "prime": ["rollout.filters=[]"]}
"""What a preset needs beside it, to fit two steps and a model that solves nothing."""
PRESET_NAMES = sorted({path.stem for path in PRESETS.glob("*.yaml")} - FOR_EPISODES)


def task(folder: Path, algorithm: dict[str, Any], **changes: Any) -> Path:
    changes = {"max_steps": 2, "validation": {}, "checkpoint": {"export_hf": False}} | changes
    path = write_task(folder, algorithm=algorithm, **changes)
    return path


def without_reference(path: Path) -> Path:
    """Presets bring the roles that they need."""
    lines = path.read_text().splitlines()
    at = lines.index("reference:")
    path.write_text("\n".join(lines[:at] + lines[at + 2 :]) + "\n")
    return path


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_a_preset_runs_and_begins_on_policy(tmp_path: Path, preset: str) -> None:
    path = without_reference(task(tmp_path, {"preset": preset}))
    overrides = BESIDE.get(preset, [])
    records = run_local(path, overrides)
    of = {"online_dpo": "preference", "spin": "spin"}.get(preset, "policy")
    first = next(record for record in records if f"loss/{of}" in record)
    assert all(math.isfinite(value) for record in records for value in record.values())
    for name in ("clip_fraction", "dual_clip_fraction"):
        assert first.get(name, 0.0) == 0
    if "ratio/mean" in first:
        assert first["ratio/mean"] == pytest.approx(1, abs=1e-6)
    if "kl/ref" in first:
        assert first["kl/ref"] == pytest.approx(0, abs=1e-9)
    begins = -first["advantage/mean"] if of == "policy" else math.log(2)
    assert first[f"loss/{of}"] == pytest.approx(begins, rel=1e-4, abs=1e-6)
    config = load_config(path, overrides).config
    assert isinstance(config, RlvrConfig)
    if config.algorithm.aggregation in ("token_mean", "sequence_mean"):
        assert first["token_weights/sum"] == pytest.approx(1, abs=1e-6)
    if preset == "vapo":
        assert "loss/policy" not in records[0]
        assert records[0]["critic/grad_norm"] > 0


def test_pairs_are_trained_alike_however_their_rows_are_divided(tmp_path: Path) -> None:
    """One pair at a time, or all of an update."""
    path = task(tmp_path, {"preset": "online_dpo"}, max_steps=3)
    found = []
    for tokens in (8, 4096):
        changes = [
            f"output_dir={tmp_path / str(tokens)}",
            f"actor_train.max_tokens_per_microbatch={tokens}",
            "actor_train.samples_per_update=8",
            "actor_train.optimizer.warmup_steps=0",
        ]
        found.append(run_local(path, changes))
    for one, other in zip(*found, strict=True):
        for key in ("loss/preference", "grad_norm", "margin", "trained_tokens"):
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), key
    assert found[0][0]["grad_norm"] > 0
    assert found[0][-1]["margin"] > found[0][0]["margin"]


def test_self_play_makes_the_answers_likelier_than_the_responses(tmp_path: Path) -> None:
    path = task(
        tmp_path,
        {"preset": "spin"},
        rewards={},
        max_steps=6,
        actor_train={"pool": "all", "optimizer": {"lr": 3e-3}, "samples_per_update": 8},
    )
    records = run_local(without_reference(path), ["actor_train.epochs=2"])
    for record in records:
        assert record["answer_tokens/max"] <= 4
        assert record["staleness/max"] == 0
        assert "mismatch/kl" not in record  # no engine wrote the answers
        assert record["margin"] > 0  # later updates of a step are ahead of the first
        assert record["loss/spin"] < math.log(2)


def test_a_factor_of_the_loss_changes_from_step_to_step_and_comes_back(tmp_path: Path) -> None:
    bonus = {"kind": "entropy", "coef": 0.4, "end_coef": 0.1}
    path = task(
        tmp_path,
        {"loss": [{"kind": "ppo_clip"}, bonus]},
        max_steps=4,
        checkpoint={"every": 2, "export_hf": False},
    )
    records = assert_resumes_to_the_bit(path, tmp_path, 4)
    for record, coef in zip(records, (0.4, 0.3, 0.2, 0.1), strict=True):
        assert record["coef/entropy"] == pytest.approx(coef)
        # One update with `token_mean`: what the metric says of its tokens is what the term has.
        assert record["loss/entropy"] == pytest.approx(-coef * record["entropy"], rel=1e-5)


def assert_resumes_to_the_bit(path: Path, folder: Path, steps: int) -> list[dict[str, Any]]:
    """A whole run, and one that has lost its last checkpoint and goes on from the one before."""
    straight = run_local(path, [f"output_dir={folder / 'straight'}"])
    halves = folder / "halves"
    run_local(path, [f"output_dir={halves}"])
    last = halves / "checkpoints" / f"step_{steps:06d}"
    last.rename(folder / "gone")
    resumed = run_local(path, [f"output_dir={halves}"])
    assert last.exists(), "nothing was trained again"
    assert [without_times(r) for r in resumed] == [without_times(r) for r in straight]
    return straight


def test_a_critic_learns_is_saved_and_comes_back_to_the_bit(tmp_path: Path) -> None:
    path = task(
        tmp_path,
        {"advantage": {"kind": "gae"}},
        critic={"pool": "all", "optimizer": {"lr": 1e-3}, "samples_per_update": 8, "epochs": 2},
        max_steps=6,
        checkpoint={"every": 3, "export_hf": False},
    )
    straight = assert_resumes_to_the_bit(path, tmp_path, 6)
    assert straight[-1]["critic/value/squared_error"] < straight[0]["critic/value/squared_error"]


def prime(folder: Path, score: str, **changes: Any) -> Path:
    """A run in which some responses succeed and others do not."""
    role = {"pool": "all", "optimizer": {"lr": 3e-3}, "score": score, "threshold": 0.1, "beta": 1.0}
    return task(
        folder,
        {"advantage": {"kind": "prime"}},
        process_reward=role | {"samples_per_update": 8, "epochs": 2},
        **changes,
    )


def test_implicit_rewards_are_learned_saved_and_come_back_to_the_bit(tmp_path: Path) -> None:
    path = prime(tmp_path, "after_update", max_steps=2, checkpoint={"every": 1, "export_hf": False})
    straight = assert_resumes_to_the_bit(path, tmp_path, 2)
    for record in straight:  # over the updates of a step, of which the first of all has log 2
        assert 0 < record["process_reward/success"] < 1
        assert record["process_reward/loss/total"] < math.log(2)
        assert record["process_reward/accuracy"] > 0.5
        assert record["process_reward/token_abs_mean"] > 0
    assert (tmp_path / "straight/checkpoints/step_000002/process_reward/meta.json").exists()


def test_the_first_rewards_before_an_update_are_zero_and_the_advantages_those_of_rloo(
    tmp_path: Path,
) -> None:
    """The model is still the reference then; one that has learned from the step is not."""
    before, after = (
        run_local(prime(tmp_path / score, score, max_steps=2))
        for score in ("before_update", "after_update")
    )
    plain = run_local(task(tmp_path / "plain", {"advantage": {"kind": "rloo"}}, max_steps=2))
    assert before[0]["process_reward/token_abs_mean"] == 0
    for name in ("advantage/abs_mean", "loss/policy", "grad_norm"):
        assert before[0][name] == pytest.approx(plain[0][name], rel=1e-5), name
        assert after[0][name] != pytest.approx(plain[0][name], rel=1e-3), name
    assert before[1]["process_reward/token_abs_mean"] > 0
    assert before[0]["process_reward/loss/total"] == after[0]["process_reward/loss/total"]


def test_running_moments_and_an_adaptive_coefficient_come_back_to_the_bit(tmp_path: Path) -> None:
    path = task(
        tmp_path,
        {
            "reward_shaping": [{"kind": "normalize", "mean": "running", "std": "running"}],
            "kl_in_reward": {"coef": 0.1, "target": 0.01, "horizon": 100},
            "advantage": {"kind": "reinforce_pp"},
        },
        max_steps=4,
        checkpoint={"every": 2, "export_hf": False},
    )
    straight = assert_resumes_to_the_bit(path, tmp_path, 4)
    coefficients = [record["kl/coef"] for record in straight if "kl/coef" in record]
    assert len(set(coefficients)) > 1


@pytest.mark.parametrize(
    "algorithm",
    [
        {
            "correction": {
                "weight": {"level": "token"},
                "reject": [{"level": "geometric", "lower": 0.5}],
            }
        },
        {"old_logprobs": "rollout", "loss": [{"kind": "clip_cov", "fraction": 0.1}]},
        {"loss": [{"kind": "kl_cov", "fraction": 0.1}, {"kind": "entropy", "coef": 0.01}]},
        {"loss": [{"kind": "dro"}, {"kind": "kl", "estimator": "k3_k2grad"}]},
        {
            "loss": [{"kind": "kimi"}],
            "masks": [{"kind": "overlong"}, {"kind": "difficulty", "low": 0}],
        },
        {
            "loss": [{"kind": "sapo"}],
            "sample_weights": [{"kind": "length"}, {"kind": "difficulty"}],
        },
        {"advantage": {"kind": "gdpo"}},
        {"advantage": {"kind": "opo"}, "advantage_shaping": [{"kind": "clip", "limit": 0.5}]},
        {"advantage": {"kind": "pass_k", "k": 2, "threshold": 0.1}},
    ],
)
def test_parts_combine(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    path = task(tmp_path, algorithm)
    records = run_local(path, ["actor_train.samples_per_update=8"])
    assert all(math.isfinite(value) for record in records for value in record.values())
    assert records[0]["grad_norm"] > 0


def save_decided_model(path: Path, seed: int) -> None:
    """Far from uniform, so that there is something to learn from it."""
    save_tiny_model(path, seed=seed)
    model = Qwen3ForCausalLM.from_pretrained(path)
    model.lm_head.weight.data *= 4
    model.save_pretrained(path)


def test_a_student_comes_closer_to_its_teacher(tmp_path: Path) -> None:
    path = task(
        tmp_path,
        {"advantage": {"kind": "distill"}, "loss": [{"kind": "pg"}]},
        actor_train={"pool": "all", "optimizer": {"lr": 3e-3}},
    )
    save_decided_model(tmp_path / "teacher", 1)
    teacher = f"teachers.t={{pool: all, model: {{path: '{tmp_path / 'teacher'}'}}}}"
    overrides = [teacher, "data.samples_per_prompt=24", "max_steps=25"]
    apart = [record["kl/teacher"] for record in run_local(path, overrides)]
    assert sum(apart[-3:]) < 0.8 * sum(apart[:3]), apart


def test_a_teacher_with_other_tokens_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    path = task(tmp_path, {"advantage": {"kind": "distill"}})
    teacher = save_tiny_model(tmp_path / "teacher")
    file = teacher / "tokenizer.json"
    file.write_text(file.read_text().replace('"7": 11', '"7": 12').replace('"8": 12', '"8": 11'))
    with pytest.raises(ConfigError, match="its token 11 is '8', the trained model's is '7'"):
        run_local(path, [f"teachers.t={{pool: all, model: {{path: '{teacher}'}}}}"])
