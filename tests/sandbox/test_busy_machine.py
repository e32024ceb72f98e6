"""Verdicts of the reward `code` are the same on a machine that has nothing else to do, and on a
busy one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.judging.problems import FORMS, problems
from roll.rewards.api import Reward
from roll.rewards.code.reward import code_reward
from roll.rewards.code.running.sandboxes import LimitSettings, SandboxSettings
from roll.rewards.contract import sample_of

PROBLEMS = 250
LIMITS = LimitSettings(cpu_s=0.4, wall_s=600.0)
"""Endless programs use up the limit, and honest ones a tenth of it."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A program, and what it is judged by."""

    name: str
    kind: str
    """`right`, or what is wrong with it."""
    program: str
    row: Any

    @property
    def expected(self) -> float:
        return float(self.kind == "right")


def programs() -> Iterator[Judged]:
    """Yield the right program of each problem and one of the wrong ones; of each form, all kinds of
    wrong ones come in turns."""
    for place, problem in enumerate(problems(PROBLEMS, seed=16)):
        kinds = sorted(problem.mutants)
        kind = kinds[place // len(FORMS) % len(kinds)]
        for each, text in (("right", problem.right), (kind, problem.mutants[kind])):
            yield Judged(f"{problem.name} {each}", each, text, problem.row)


async def rewards(judged: list[Judged]) -> list[Reward]:
    """Judge all, a few at a time."""
    gate, sandbox = asyncio.Semaphore(8), SandboxSettings(workers=2)

    async def judge(one: Judged) -> Reward:
        async with gate:
            sample = sample_of(one.program, answer="", extra=one.row)
            return await code_reward(sample, limits=LIMITS, stop=True, sandbox=sandbox)

    return list(await asyncio.gather(*map(judge, judged)))


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core busy with two other processes."""
    count = 2 * len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while 1: pass"]) for _ in range(count)]
    try:
        yield
        assert all(each.poll() is None for each in busy)
    finally:
        for each in busy:
            each.kill()
            each.wait()


@pytest.mark.slow
def test_verdicts_on_500_programs_are_right_alone_and_under_load() -> None:
    judged = list(programs())
    kinds = Counter((one.name.partition("_")[0], one.kind) for one in judged)
    assert len(judged) == 500
    assert len(kinds) == len(FORMS) * 9
    alone = asyncio.run(rewards(judged))
    with busy_cores():
        loaded = asyncio.run(rewards(judged))
    for found in (alone, loaded):
        wrong = [
            one.name
            for one, reward in zip(judged, found, strict=True)
            if reward.score != one.expected
        ]
        assert wrong == []
    differ = [
        (one.name, first.parts, second.parts)
        for one, first, second in zip(judged, alone, loaded, strict=True)
        if first != second
    ]
    assert differ == []
