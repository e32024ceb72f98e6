"""Makers of groups: what they count in a step."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll.config import load_config
from roll.config.sections.environment import EnvironmentConfig
from roll.config.sections.reward import RewardConfig
from roll.core.errors import EnvironmentFailedError
from roll.rewards.execution.counters import Purpose
from roll.runtime.group_makers import EpisodeMakers, GroupMakers, reward_timeout_s
from tests.fakes import group
from tests.runs import write_task


@pytest.mark.parametrize(
    ("seats", "trained", "episodes"),
    [(1, "all", 40), (2, "all", 20), (4, "all", 10), (2, "one", 40)],
)
def test_a_tenth_of_the_episodes_may_fail_however_many_players_each_has(
    seats: int, trained: str, episodes: int
) -> None:
    config = EnvironmentConfig.model_validate(
        {"env": "x", "seats": seats, "trained_seats": trained, "max_error_rate": 0.1}
    )
    hosts: Any = {"game": SimpleNamespace(name="lake", config=config)}
    router: Any = SimpleNamespace(begin_step=lambda *_: None)
    none: Any = None
    makers = EpisodeMakers(none, none, none, router, hosts=hosts)
    makers.begin_step({"game": 40})
    failed = makers.failed[Purpose.TRAINING]
    for _ in range(episodes // 10):
        failed.count("lake", "it broke")
    with pytest.raises(EnvironmentFailedError, match=f"the {episodes} to come"):
        failed.count("lake", "it broke")


@pytest.mark.parametrize(("kind", "greedy"), [("grpo", False), ("remax", True)])
def test_a_group_that_waited_fits_with_as_many_samples_and_greedy_ones_as_this_run_makes(
    kind: str, greedy: bool, tmp_path: Path
) -> None:
    none: Any = None
    config: Any = load_config(write_task(tmp_path), [f"algorithm.advantage.kind={kind}"]).config
    makers = GroupMakers(config, none, none, none, none)
    made = group("a", [1.0] * config.data.samples_per_prompt)
    compared = replace(made, baseline=made.samples[0])
    assert (makers.fits(made), makers.fits(compared)) == (not greedy, greedy)
    wanted = compared if greedy else made
    assert not makers.fits(replace(wanted, samples=made.samples[1:]))


JUDGED = {"judge": {"by": "own", "template": "judge.txt", "verdict": {"kind": "number"}}}


@pytest.mark.parametrize(
    ("reward", "on_devices", "limit_s"),
    [
        ({"fn": "math"}, (), 3600),
        ({"fn": "code"}, (), 7200),  # at an hour the sample fails, and not the run
        ({"fn": "math", "timeout_s": 4000, "queue_timeout_s": 1000}, (), 10000),
        ({"model": {"path": "m"}}, (), math.inf),
        (JUDGED, (), 3600),
        (JUDGED, ("own",), math.inf),
    ],
)
def test_rewards_may_wait_for_a_training_step_and_for_their_own_limits(
    reward: dict[str, Any], on_devices: tuple[str, ...], limit_s: float
) -> None:
    config: Any = SimpleNamespace(
        rewards={"r": RewardConfig.model_validate(reward)}, cluster_judges=on_devices
    )
    assert reward_timeout_s(config) == limit_s
