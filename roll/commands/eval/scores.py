"""Scores of answers: means over questions, each with its standard error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from roll.commands.eval.answers import Answered
from roll.rollout.evaluate import prompt_scores

Z95 = 1.959963984540054
"""Quantile 0.975 of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Score:
    """Mean over questions, with its standard error.

    Questions are the independent units, not responses (the responses to one question are alike). So
    the standard error is that of a mean of questions' scores, the standard deviation of these (with
    N - 1) by the root of their number N. It is the error clustered by question (Miller 2024,
    arXiv:2411.00640) where all have equally many responses.
    """

    value: float
    stderr: float | None
    """None for a single question."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Score:
        """Return the score of at least one question's values."""
        count, mean = len(values), math.fsum(values) / len(values)
        if count < 2:
            return cls(mean, None)
        variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
        return cls(mean, math.sqrt(variance / count))

    @property
    def interval(self) -> tuple[float, float] | None:
        """Interval of 95 %, mean +- 1.96 standard errors; None for a single question."""
        if self.stderr is None:
            return None
        return self.value - Z95 * self.stderr, self.value + Z95 * self.stderr


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of the answers to several questions."""

    questions: int
    samples: int
    """Number of responses to each question."""
    by_name: Mapping[str, Score]
    """`mean@n`, `pass@k`, `maj@n`, then the mean of each reward by its name if there are several,
    `tokens` (of a response), `truncated` (share of the responses), and `left_out`, the share of
    responses on which a reward failed, if there are any."""


def scores_of(answers: Iterable[Answered], samples: int, pass_score: float) -> Scores:
    """Return the scores of answers.

    A response on which a reward failed counts neither for nor against the model; a question of
    which all failed counts for lengths alone.

    Args:
        answers: answers to at least one question.
        samples: number of responses to each.
        pass_score: reward from which on a response passes.
    """
    columns: dict[str, list[float]] = {}
    listed = list(answers)
    for one in listed:
        for name, value in _of_question(one, samples, pass_score).items():
            columns.setdefault(name, []).append(value)
    left = columns.pop("left_out")
    if any(left):
        columns["left_out"] = left
    return Scores(len(listed), samples, {name: Score.of(own) for name, own in columns.items()})


def _of_question(one: Answered, samples: int, pass_score: float) -> dict[str, float]:
    """Return the values of one question by the names in `Scores.by_name`."""
    judged = [i for i, reward in enumerate(one.rewards) if reward is not None]
    rewards = [reward for reward in one.rewards if reward is not None]
    votes = [None if one.votes is None else one.votes[i] for i in judged]
    found = prompt_scores(rewards, votes, samples, pass_score=pass_score)
    if one.votes is None or samples == 1:
        found.pop(f"maj@{samples}", None)
    for name, column in one.scores.items() if len(one.scores) > 1 else ():
        values = [value for value in column if value is not None]
        if values:
            found[name] = math.fsum(values) / len(values)
    found["tokens"] = sum(one.tokens) / len(one.tokens)
    found["truncated"] = sum(one.truncated) / len(one.truncated)
    found["left_out"] = 1 - len(judged) / len(one.rewards)
    return found
