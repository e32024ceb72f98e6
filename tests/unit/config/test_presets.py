"""Presets over run files: what a later layer names is what is trained."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from roll.algorithms import build_shaping
from roll.algorithms.shaping.rewards import Rewards
from roll.config import load_config
from roll.config.algorithm import AlgorithmConfig
from roll.config.algorithm.losses import GspoConfig
from roll.config.errors import ConfigError
from roll.config.loading.compose import PRESETS
from roll.config.rlvr_base import RlvrBase
from roll.config.sections.engines import SglangConfig
from tests.unit.shaping.test_shaping_rewards import responses

ROOT = Path(__file__).parents[3]
NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))
CONFIGS = {path: load_config(path).config for path in ROOT.glob("examples/*/*.yaml")}
EXAMPLES = sorted(
    path
    for path, config in CONFIGS.items()
    if isinstance(config, RlvrBase)
    and config.pipeline == "rlvr"
    and not config.domains
    and config.critic is None
)
"""Examples whose tags have no algorithms of their own, which a preset would have to fit; and
without a critic, which most presets do not use."""
ANSWERED = [
    path
    for path in EXAMPLES
    if isinstance(config := CONFIGS[path], RlvrBase)
    and config.rollout.max_staleness == 0
    and all(source.columns.answer for source in config.data.sources)
]
"""Examples in which spin can learn: rows with answers, responses of the policy before the step."""
AGENTIC = sorted(ROOT.glob("examples/agentic_*/run.yaml"))
FOR_EPISODES = {"gigpo", "turn_ppo"}
FITTING = {**dict.fromkeys(FOR_EPISODES, AGENTIC), "spin": ANSWERED}
"""Preset -> the examples that it fits, if these are not `EXAMPLES`."""
BESIDE = {
    "agentic_self_play": ["reference={pool: all}"],
    "async_8b.yaml": ["algorithm.correction=null"],
    "on_policy.yaml": ["teachers.sorter=null", "data.samples_per_prompt=8"],
    "on_policy_distill_8b.yaml": ["teachers.large=null"],
}
"""What an example needs beside a preset: teachers, whom no preset asks, and weights of tokens,
which losses by sequence refuse, are left out; and a reference that follows, with which not all
presets compare."""


@functools.cache
def as_written(example: Path) -> RlvrBase:
    config = load_config(example).config
    assert isinstance(config, RlvrBase)
    return config


@functools.cache
def parts(preset: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((PRESETS / f"{preset}.yaml").read_text())
    return content


def check(config: RlvrBase, preset: str) -> None:
    """Every part that the preset sets is the preset's own."""
    assert config.algorithm.preset == preset
    expected = AlgorithmConfig.model_validate(_tuples(parts(preset)["algorithm"]), strict=False)
    for key in parts(preset)["algorithm"]:
        assert getattr(config.algorithm, key) == getattr(expected, key), key
    filters = parts(preset).get("rollout", {}).get("filters", ())
    if filters:
        found = [each.model_dump() for each in config.rollout.filters]
        assert found == list(filters)
    for role in ("reference", "critic", "process_reward"):
        assert getattr(config, role) is not None or role not in parts(preset)


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(each) for key, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "preset"),
    [(e, p) for p in NAMES for e in FITTING.get(p, EXAMPLES)],
    ids=lambda value: value if isinstance(value, str) else str(value.relative_to(ROOT)),
)
def test_the_command_line_trains_the_preset_that_it_names(example: Path, preset: str) -> None:
    named = BESIDE.get(example.name, BESIDE.get(example.parent.name, ()))
    beside = [*named, *(["max_steps=300"] if preset == "vapo" else ())]
    config = load_config(example, [f"algorithm.preset={preset}", *beside]).config
    assert isinstance(config, RlvrBase)
    check(config, preset)
    without = as_written(example)
    assert config.sources == without.sources
    assert config.pools == without.pools


def test_the_command_itself_shows_the_preset() -> None:
    told = subprocess.run(
        [
            *(sys.executable, "-m", "roll.cli", "show"),
            *("examples/rlvr_quickstart/run.yaml", "algorithm.preset=gspo"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    algorithm = yaml.safe_load(told.stdout)["algorithm"]
    assert [term["kind"] for term in algorithm["loss"]] == ["gspo"]
    assert algorithm["aggregation"] == "sequence_mean"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    quickstart = ROOT / "examples/rlvr_quickstart/run.yaml"
    (tmp_path / "base.yaml").write_text(f"defaults: [{quickstart}]\n")
    return tmp_path


def layered(folder: Path, text: str, *overrides: str) -> RlvrBase:
    path = folder / "run.yaml"
    path.write_text("defaults: [base.yaml]\n" + text)
    config = load_config(path, overrides).config
    assert isinstance(config, RlvrBase)
    return config


@pytest.mark.parametrize("preset", NAMES)
def test_a_file_trains_the_preset_that_it_names(folder: Path, preset: str) -> None:
    if preset in FOR_EPISODES:
        (folder / "base.yaml").write_text(f"defaults: [{AGENTIC[0]}]\n")
    check(layered(folder, f"max_steps: 60\nalgorithm: {{preset: {preset}}}\n"), preset)


def test_what_a_layer_says_beside_its_preset_wins_over_it(folder: Path) -> None:
    own = "algorithm: {preset: dapo, aggregation: sequence_mean, loss: [{kind: pg}]}\n"
    config = layered(folder, own)
    assert config.algorithm.aggregation == "sequence_mean"
    assert [term.kind for term in config.algorithm.loss] == ["pg"]
    assert [each.kind for each in config.rollout.filters] == ["equal_rewards"]
    for order in (1, -1):
        overrides = ["algorithm.preset=gspo", "algorithm.loss.0.clip_high=0.1"][::order]
        (term,) = layered(folder, own, *overrides).algorithm.loss
        assert isinstance(term, GspoConfig)
        assert (term.kind, term.clip_high) == ("gspo", 0.1)


def test_a_later_preset_leaves_nothing_of_an_earlier_one(folder: Path) -> None:
    config = layered(
        folder, "algorithm: {preset: ppo, kl_in_reward: {coef: 0.5}}\n", "algorithm={preset: gspo}"
    )
    assert (config.critic, config.algorithm.kl_in_reward) == (None, None)
    assert config.algorithm.advantage_shaping == ()
    config = layered(folder, "algorithm: {preset: dapo}\n", "algorithm.preset=dr_grpo")
    assert (config.rollout.filters, config.algorithm.reward_shaping) == ((), ())


def test_a_preset_moves_no_role_and_forgets_nothing_beside_its_parts(folder: Path) -> None:
    own = (
        'pools: {more: "1"}\ncluster: {devices_per_node: 2}\n'
        "reference: {pool: more}\nrollout: {max_in_flight_groups: 7}\n"
        "critic: {pool: more, optimizer: {lr: 0.001}, warmup_steps: 3}\n"
        "algorithm: {advantage: {kind: gae}, masks: [{kind: overlong}]}\n"
    )
    config = layered(folder, own, "algorithm.preset=vapo")
    reference = config.reference_role
    assert reference is not None
    assert config.critic is not None
    assert (reference.pool, reference.strategy.kind) == ("more", "hf")
    assert (config.critic.pool, config.critic.optimizer.lr) == ("more", 0.001)
    assert config.critic.warmup_steps == 50
    assert config.rollout.max_in_flight_groups == 7
    assert [mask.kind for mask in config.algorithm.masks] == ["overlong"]


def test_a_role_that_a_later_preset_does_not_need_is_refused_as_such(folder: Path) -> None:
    own = "algorithm: {preset: ppo}\ncritic: {optimizer: {lr: 0.001}}\n"
    with pytest.raises(ConfigError) as caught:
        layered(folder, own, "algorithm.preset=grpo")
    assert "critic: nothing uses its values" in str(caught.value)
    assert "pool" not in str(caught.value)
    assert layered(folder, own, "algorithm.preset=grpo", "critic=null").critic is None


def test_null_takes_a_preset_away(folder: Path) -> None:
    config = layered(folder, "algorithm: {preset: dapo}\n", "algorithm.preset=null")
    assert config.algorithm.preset is None
    assert config.rollout.filters == ()


def test_what_a_finished_run_resolved_to_runs_as_it_is(folder: Path) -> None:
    config = layered(folder, "algorithm: {preset: dapo, masks: [{kind: overlong}]}\n")
    again = folder / "config.yaml"
    again.write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    assert load_config(again).config == config


@pytest.mark.parametrize(
    ("override", "blamed"),
    [
        ("rollout.filters=[{kind: equal_reward}]", "rollout.filters.0.kind"),
        ("algorithm.loss=[{kind: ppo_clip, clip_hig: 1}]", "algorithm.loss.0.clip_hig"),
        ("algorithm.loss=[{kind: kl}, {kind: kl}]", "algorithm"),
        ("algorithm={loss: [{kind: kl, coef: -1.0}]}", "algorithm.loss.0.coef"),
        ("algorithm.advantage.kind=grp", "algorithm.advantage.kind"),
        ("algorithm.correction={}", "algorithm.correction"),
    ],
)
def test_an_override_is_blamed_on_the_command_line(
    folder: Path, override: str, blamed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        layered(folder, "algorithm: {preset: dapo}\n", override)
    assert str(caught.value).startswith(f"command line: {blamed} = "), caught.value


def test_what_a_preset_says_is_blamed_on_whoever_named_it(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        layered(folder, "max_steps: 20\n", "algorithm.preset=vapo")
    line = (
        r"command line \(preset vapo\.yaml:\d+\): critic\.warmup_steps: 50 leaves the policy none"
    )
    assert re.match(line, str(caught.value))
    with pytest.raises(ConfigError) as caught:
        layered(folder, "max_steps: 20\nalgorithm: {preset: vapo}\n")
    assert re.match(r".*run\.yaml:3 \(preset vapo\.yaml:\d+\): critic", str(caught.value))
    with pytest.raises(ConfigError, match=r"run\.yaml:2: algorithm\.preset = 'vap': unknown"):
        layered(folder, "algorithm: {preset: vap}\n")


def test_a_mistake_of_a_file_is_blamed_on_that_file(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml:2: algorithm\.loss\.0\.clip_hig = "):
        layered(folder, "algorithm: {preset: dapo, loss: [{kind: ppo_clip, clip_hig: 1}]}\n")


def test_a_kind_of_the_command_line_keeps_what_it_says_beside_it(folder: Path) -> None:
    for order in (1, -1):
        overrides = ["actor_infer.strategy.kind=sglang", "actor_infer.strategy.max_model_len=99"]
        strategy = layered(folder, "", *overrides[::order]).actor_infer.strategy
        assert isinstance(strategy, SglangConfig)
        assert (strategy.kind, strategy.max_model_len) == ("sglang", 99)


@pytest.mark.parametrize("preset", ["dapo", "cispo"])
def test_a_right_answer_at_the_limit_is_worth_more_than_a_short_wrong_one(
    folder: Path, preset: str
) -> None:
    config = layered(folder, f"algorithm: {{preset: {preset}}}\n")
    shaping = build_shaping(config.algorithm, max_new_tokens=10)
    shaped = Rewards(torch.tensor([1.0, 0.0, 1.0, 0.0]).double())
    batch = responses([10, 3, 3, 10], shaped.total_B.tolist())
    for part in shaping.reward_parts.values():
        shaped, _ = part(shaped, batch)
    long_right, short_wrong, short_right, long_wrong = shaped.total_B.tolist()
    assert short_right > long_right > short_wrong > long_wrong


@pytest.mark.parametrize("preset", NAMES)
def test_a_preset_says_what_it_leaves_out(preset: str) -> None:
    text = (PRESETS / f"{preset}.yaml").read_text()
    top = text[: text.index("\nalgorithm:")]
    assert "arXiv" in top
    assert "Left out:" in top
