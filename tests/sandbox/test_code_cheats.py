"""Wrong programs that attack their judge pass in no form of cases; right ones pass in each.

Attacks on calls and asserts alone: test_verdicts.py.
"""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.judge_code import wrong_verdicts
from benchmarks.judging.cheats import CHEATS, ROWS
from benchmarks.judging.problems import problems
from roll.rewards.code.reward import code_reward
from roll.rewards.code.running.sandboxes import LimitSettings, SandboxSettings
from roll.rewards.contract import sample_of

TWO = SandboxSettings(workers=2)


@pytest.mark.parametrize("form", sorted(ROWS))
def test_no_attack_passes(form: str) -> None:
    row, right = ROWS[form]

    async def scores(programs: list[str]) -> list[float]:
        limits = LimitSettings(cpu_s=2.0, wall_s=120.0)
        samples = [sample_of(each, answer="", extra=row) for each in programs]
        found = [
            code_reward(sample, limits=limits, sandbox=TWO, score="share") for sample in samples
        ]
        return [each.score for each in await asyncio.gather(*found)]

    assert len(CHEATS) >= 20
    first, *others = asyncio.run(scores([right, *CHEATS.values()]))
    assert first == 1.0
    assert {name: got for name, got in zip(CHEATS, others, strict=True) if got} == {}


def test_problems_of_all_forms_have_mutants() -> None:
    made = list(problems(300))
    assert {each.form for each in made} == set(ROWS)
    assert len(made) == 300
    assert all(len(each.mutants) >= 8 for each in made)


@pytest.mark.slow
def test_right_programs_pass_and_mutants_do_not() -> None:
    judged, wrong = asyncio.run(wrong_verdicts(10, 7, TWO))
    assert wrong == []
    assert judged >= 90
