"""Collecting many answers costs what reading them costs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import ray

from roll.config.sections.roles import Role
from roll.distributed.on_ray.answers import RayAnswers
from roll.distributed.on_ray.members import Member
from roll.distributed.on_ray.resources import ResourceManager
from roll.distributed.watchdog import Watchdog

COUNT = 4096


@pytest.fixture
def watchdog(manager: ResourceManager) -> Iterator[Watchdog]:
    watchdog = Watchdog()
    yield watchdog
    watchdog.close()


@pytest.mark.slow
def test_thousands_of_ready_answers_are_collected_in_the_time_that_reading_them_takes(
    watchdog: Watchdog,
) -> None:
    members = [Member(Role.REWARD, "", rank, replaceable=False) for rank in range(COUNT)]
    refs = [ray.put(i) for i in range(COUNT)]
    begun = time.perf_counter()
    assert ray.get(refs) == list(range(COUNT))
    reading_s = time.perf_counter() - begun
    begun = time.perf_counter()
    assert RayAnswers("method", refs, members, watchdog).collect(60) == list(range(COUNT))
    # One by one, each with a look at all others, it is 34 times as long.
    assert time.perf_counter() - begun < 10 * reading_s + 0.1
