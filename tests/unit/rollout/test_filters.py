"""Which groups the filters of the config let through, and what they say of those they refuse."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from roll.commands.preflight import inspect
from roll.config import load_config
from roll.config.sections.rollout import (
    CustomFilterConfig,
    DropConfig,
    EqualRewardsConfig,
    FilterConfig,
    MeanRewardConfig,
)
from roll.core.errors import ConfigError, RollError
from roll.rollout.assemble import rollout_metrics
from roll.rollout.filters import build_filters, without_dropped
from roll.rollout.types import Group
from tests.fakes import group
from tests.runs import write_task

MINE = """
def long_enough(group, least=2):
    return None if len(group.samples) >= least else f"fewer than {least} samples"

def keep(group):
    return group.prompt.id != "bad"

def broken(group):
    return group.nothing

def odd(group):
    return 3

async def later(group):
    return None

class Later:
    async def __call__(self, group): return None

later_called = Later()

class Strict:
    def __call__(self, group): return None

LIMIT = 3
"""


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "mine_filters.py").write_text(MINE)
    sys.path.insert(0, str(tmp_path))
    yield "mine_filters"
    sys.path.remove(str(tmp_path))
    sys.modules.pop("mine_filters", None)


def verdict(config: FilterConfig, of: Group) -> str | None:
    (only,) = build_filters([config])
    return only(of)


def custom(fn: str, **kwargs: Any) -> CustomFilterConfig:
    return CustomFilterConfig(fn=fn, kwargs=kwargs)


def test_samples_are_left_out_by_a_part_of_a_reward() -> None:
    made = group("a", [1.0, 0.0, 1.0, 1.0])
    told = [{"game/malformed": 0.0}, {"game/malformed": 3.0}, {}, {"game/malformed": 1.0}]
    samples = tuple(
        replace(one, parts=parts, by_name={"honest": float(place != 3)})
        for place, (one, parts) in enumerate(zip(made.samples, told, strict=True))
    )
    made = replace(made, samples=samples)

    def left(*rules: DropConfig) -> list[bool]:
        return [one.has_reward for one in without_dropped(made, rules).samples]

    assert left(DropConfig(part="game/malformed", above=1)) == [True, False, True, True]
    assert left(DropConfig(part="game/malformed", above=0)) == [True, False, True, False]
    assert left(DropConfig(part="game/malformed", below=0.5)) == [False, True, True, True]
    assert left(DropConfig(part="honest", below=1)) == [True, True, True, False]
    rules = (DropConfig(part="game/malformed", above=1), DropConfig(part="honest", below=1))
    found = without_dropped(made, rules)
    assert found.rewards == (1.0, 1.0)
    assert verdict(EqualRewardsConfig(), found) == "all rewards equal to 1"
    metrics = rollout_metrics([found], current_version=0).values_by_name()
    assert (metrics["samples/dropped"], metrics["samples/left_out"]) == (2, 2)
    assert metrics["reward/game/malformed"] == pytest.approx(4 / 3), "of all samples"
    assert "samples/dropped" not in rollout_metrics([made], current_version=0)


def test_a_rule_needs_a_bound_and_a_known_reward(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="without a bound"):
        DropConfig(part="digits/length")
    path = write_task(tmp_path, rollout={"drop": [{"part": "digit/length", "above": 3}]})
    with pytest.raises(ConfigError, match=r"rollout\.drop\.0\.part.*did you mean 'digits'"):
        load_config(path)


def test_groups_without_contrast_are_rejected() -> None:
    config = EqualRewardsConfig()
    assert verdict(config, group("a", [0.0, 0.0])) == "all rewards equal to 0"
    assert verdict(config, group("a", [0.0, 1.0])) is None


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 0.0, 0.0, 0.0], "mean reward at most 0.25"),
        ([1.0, 0.0, 0.0, 0.0], "mean reward at most 0.25"),  # the bounds themselves are outside
        ([1.0, 1.0, 0.0, 0.0], None),
        ([1.0, 1.0, 1.0, 0.0], "mean reward at least 0.75"),
    ],
)
def test_the_mean_reward_must_lie_strictly_within_the_bounds(
    rewards: list[float], expected: str | None
) -> None:
    assert verdict(MeanRewardConfig(low=0.25, high=0.75), group("a", rewards)) == expected


def test_the_default_bounds_reject_what_is_always_or_never_solved() -> None:
    found = [verdict(MeanRewardConfig(), group("a", r)) for r in ([0.0] * 3, [1.0] * 3, [0.0, 1])]
    assert [reason is None for reason in found] == [False, False, True]


def test_a_function_of_the_user_s_may_give_a_reason_or_a_bool(mine: str) -> None:
    assert verdict(custom(f"{mine}:long_enough"), group("a", [1.0, 1.0])) is None
    assert verdict(custom(f"{mine}:long_enough", least=3), group("a", [1.0, 1.0])) == (
        "fewer than 3 samples"
    )
    assert verdict(custom(f"{mine}:keep"), group("good", [1.0])) is None
    assert verdict(custom(f"{mine}:keep"), group("bad", [1.0])) == f"{mine}:keep returned False"


def test_a_verdict_of_another_type_stops_the_run_with_the_key_and_the_prompt(mine: str) -> None:
    with pytest.raises(RollError) as caught:
        verdict(custom(f"{mine}:odd"), group("p7", [1.0]))
    message = str(caught.value)
    assert "rollout.filters.0.fn: mine_filters:odd returned 3 (int)" in message
    assert "prompt p7" in message


def test_an_error_of_a_filter_names_the_key_the_prompt_and_the_line_of_the_user(mine: str) -> None:
    with pytest.raises(RollError) as caught:
        verdict(custom(f"{mine}:broken"), group("p7", [1.0]))
    told = str(caught.value).splitlines()
    assert (
        told[0]
        == "rollout.filters.0.fn: mine_filters:broken raised an error for the group of prompt p7"
    )
    assert "mine_filters.py" in told[2], "the traceback begins with the user's own line"
    assert "has no attribute 'nothing'" in told[-1]


@pytest.mark.parametrize(
    ("fn", "kwargs", "parts"),
    [
        ("long_enough", {"most": 3}, ["rollout.filters.1", "unexpected keyword", "'most'"]),
        ("keep", {"group": 3}, ["rollout.filters.1", "multiple values", "'group'"]),
        ("later", {}, ["rollout.filters.1.fn", "`async`"]),
        ("later_called", {}, ["rollout.filters.1.fn", "`async`"]),
        ("Strict", {}, ["rollout.filters.1.fn", "is a class"]),
        ("LIMIT", {}, ["rollout.filters.1.fn", "is a int"]),
        ("kep", {}, ["rollout.filters.1.fn", "did you mean 'keep'?"]),
    ],
)
def test_a_function_that_cannot_be_called_with_a_group_is_refused(
    mine: str, fn: str, kwargs: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_filters([EqualRewardsConfig(), custom(f"{mine}:{fn}", **kwargs)])
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_the_check_of_a_config_finds_a_filter_that_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "mine_filters.py").write_text(MINE)
    path = write_task(tmp_path)
    good = "rollout.filters=[{kind: equal_rewards}, {kind: custom, fn: 'mine_filters:keep'}]"
    assert inspect(load_config(path, [good])) == []
    (finding,) = inspect(load_config(path, [good.replace(":keep", ":kep")]))
    assert "rollout.filters.1.fn" in str(finding.error)
    assert "did you mean 'keep'?" in str(finding.error)
    assert not finding.only_here
    (finding,) = inspect(load_config(path, [good.replace("mine_filters:keep", "no_such:keep")]))
    assert "rollout.filters.1.fn: no module named 'no_such'" in str(finding.error)
    assert "mine_filters" not in sys.modules


def test_bounds_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ValidationError, match="low = 1 must lie below high = 0"):
        MeanRewardConfig(low=1.0, high=0.0)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "algorithm={advantage: {kind: reinforce}}|data.samples_per_prompt=1|"
            "rollout.filters=[{kind: equal_rewards}]",
            ["rollout.filters.0: a group of 1", "at least 2"],
        ),
        (
            "algorithm={advantage: {kind: reinforce}, reward_shaping: "
            "[{kind: normalize, mean: group, std: batch}]}|data.samples_per_prompt=1",
            ["algorithm.reward_shaping.0.mean: a group of 1"],
        ),
        (
            "algorithm.reward_shaping=[{kind: overlong_penalty, max_tokens: 90, buffer_tokens: 9}]",
            ["algorithm.reward_shaping.0: no response is long enough", "= 81", "is 12"],
        ),
        (
            "algorithm.kl_in_reward={target: 0.1, horizon: 15}",
            ["algorithm.kl_in_reward.horizon: 15 samples are less than the 16 of one step"],
        ),
        ("reference=null|algorithm={kl_in_reward: {}}", ["kl_in_reward needs a `reference`"]),
        ("rollout.drop_equal_rewards=true", ["rollout.drop_equal_rewards", "unknown key"]),
        (
            "rollout.filters=[{kind: equal_reward}]",
            ["'equal_reward'", "did you mean 'equal_rewards'?"],
        ),
    ],
)
def test_filters_and_shaping_that_do_not_fit_the_run_are_refused(
    tmp_path: Path, override: str, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write_task(tmp_path), override.split("|"))
    assert all(part in str(caught.value) for part in parts), str(caught.value)
