"""Two rewards to copy: a function, and a class for when the reward owns something."""

from __future__ import annotations

import json
from pathlib import Path

from roll.extend import Reward, RewardContext, RewardWorker, Sample


def sorted_digits(sample: Sample, partial_credit: float = 0.2) -> Reward:
    """1 for the right order; `partial_credit` for the right digits in another order."""
    response = sample.response_text.strip()
    right = response == sample.answer
    same_digits = sorted(response) == sorted(sample.answer)
    return Reward(
        score=1.0 if right else partial_credit * same_digits,
        parts={"right": float(right), "same_digits": float(same_digits)},
    )


class DigitsInPlace(RewardWorker):
    """Credit for every digit that stands where it belongs: the first ones weigh most.

    The weights lie in a file beside this one, which is read once per worker.
    """

    async def setup(self, ctx: RewardContext, table: str) -> None:
        # Beside this module, wherever the run was started and the worker lives.
        file = Path(__file__).with_name(table)
        self.weights: list[float] = json.loads(file.read_text(encoding="utf-8"))

    async def score(self, sample: Sample, ctx: RewardContext) -> Reward:
        places = zip(self.weights, sample.response_text.strip(), sample.answer, strict=False)
        return Reward(score=sum(weight for weight, digit, right in places if digit == right))
