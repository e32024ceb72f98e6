"""Makers of groups: what they count in a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from roll.config.sections.environment import EnvironmentConfig
from roll.core.errors import EnvironmentFailedError
from roll.rewards.execution.counters import Purpose
from roll.runtime.group_makers import EpisodeMakers


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
