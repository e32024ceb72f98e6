"""Two rewards to copy: a function, and a class for when the reward owns something."""

from __future__ import annotations

import json
from pathlib import Path

from roll.core.types import Sample
from roll.rewards.api import Reward, RewardContext
from roll.workers.reward import RewardWorker


def sorted_digits(sample: Sample, partial_credit: float = 0.2) -> Reward:
    """1 for the right order; `partial_credit` for the right digits in another order."""
    response = sample.response_text.strip()
    right = response == sample.answer
    same_digits = sorted(response) == sorted(sample.answer)
    return Reward(
        score=1.0 if right else partial_credit * same_digits,
        parts={"right": float(right), "same_digits": float(same_digits)},
    )


class ForbiddenDigits(RewardWorker):
    """-1 for each digit of the response that is on a list; the list is read once per worker."""

    async def setup(self, ctx: RewardContext, list_file: str) -> None:
        self.forbidden = set(json.loads(Path(list_file).read_text(encoding="utf-8")))

    async def score(self, sample: Sample, ctx: RewardContext) -> Reward:
        return Reward(score=-float(sum(c in self.forbidden for c in sample.response_text)))
