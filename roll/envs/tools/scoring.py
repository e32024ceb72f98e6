"""Scoring of the answer to a task with tools."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

from roll.core.completion import Completion, FinishReason, VersionRuns
from roll.core.registry import Registry
from roll.core.types import Prompt, Sample
from roll.rewards.api import Reward
from roll.rewards.math.reward import math_reward
from roll.rewards.text.number import number_reward, parse_number

Score = Callable[[str, str], float]
"""Function of an answer and the right one; 1 for a right answer, 0 for a wrong one."""
SCORES: Registry[Score] = Registry("score of answers")
"""Scores by the name that `score` of the environment `tools` uses."""


@SCORES.register("exact")
def exact(answer: str, right: str) -> float:
    """Return 1 if both texts are equal apart from white space at their ends, else 0."""
    return float(answer.strip() == right.strip())


@SCORES.register("number")
def number(answer: str, right: str) -> float:
    """Return 1 if both numbers are equal up to a millionth of the right one, else 0.

    An answer that is one number needs no mark; for others see the reward `number`.
    """
    alone, wanted = parse_number(answer.strip()), parse_number(right.rpartition("####")[2])
    if alone is not None and wanted is not None:
        return float(abs(alone - wanted) <= Decimal("1e-6") * abs(wanted))
    return number_reward(_sample(answer, right)).score


@SCORES.register("math")
def math(answer: str, right: str) -> float:
    """Return 1 if both are equal mathematical expressions, else 0; see the reward `math`."""
    found = math_reward(_sample(answer, right))
    return found.score if isinstance(found, Reward) else float(found)


@SCORES.register("none")
def none(answer: str, right: str) -> float:
    """Return 0, because the run's own `rewards` score the answer."""
    return 0.0


def _sample(answer: str, right: str) -> Sample:
    """Return the sample that the rewards of single turns take."""
    written = Completion.of([], [], VersionRuns(), FinishReason.STOP).with_text(answer)
    return Sample("tools", "tools", Prompt("tools", (), "", right, ""), written)
