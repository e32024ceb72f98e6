"""Shorter responses preferred: as a reward among siblings, or as a weight in the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.shaping.interface import REWARD_SHAPINGS, SAMPLE_WEIGHTS, Rewards
from roll.algorithms.siblings import Siblings
from roll.core.batches import RolloutBatch
from roll.core.metrics import Mean, Metrics


def response_tokens(batch: RolloutBatch) -> Tensor:
    """Tokens that the policy wrote, float64 `[B]`; neither prompt nor padding nor environment."""
    return batch.loss_mask.sum(1).double()


def relative_length(lengths_B: Tensor, shortest_B: Tensor, longest_B: Tensor) -> Tensor:
    """(length - shortest) / (longest - shortest), within [0, 1]; 0.5 where all are equal."""
    range_B = longest_B - shortest_B
    share_B = (lengths_B - shortest_B) / range_B.clamp(min=1)
    return torch.where(range_B > 0, share_B, 0.5)


@REWARD_SHAPINGS.register("length_penalty")
@dataclass(frozen=True, kw_only=True)
class LengthPenalty:
    """reward + coef * x, among the siblings of a prompt (Kimi k1.5, arXiv 2501.12599, 2.3.3):

        x = 0.5 - (length - shortest) / (longest - shortest)    of a sample that passes
        min(0, x)                                               of one that does not

    0 for all where the siblings are equally long. Whether a sample passes is judged by the reward
    as it was paid, before any shaping. The greedy baseline, whose length is not known, stays.

    Metrics: `mean` of what is added.
    """

    coef: float = 1.0
    pass_score: float = 1.0

    def __call__(self, rewards: Rewards, batch: RolloutBatch) -> tuple[Rewards, Metrics]:
        passed_B = batch.require("rewards", made_by="assemble") >= self.pass_score
        lengths_B = response_tokens(batch)
        share_B = relative_length(lengths_B, *Siblings.of(batch.group_ids).range(lengths_B))
        short_B = 0.5 - share_B
        added_B = self.coef * torch.where(passed_B, short_B, short_B.clamp(max=0))
        shaped = Rewards(rewards.total_B + added_B, rewards.baseline_B)
        return shaped, Metrics({"mean": Mean(added_B.sum().item(), len(batch))})


@SAMPLE_WEIGHTS.register("length")
@dataclass(frozen=True, kw_only=True)
class LengthWeight:
    """max - (max - min) * (length - shortest) / (longest - shortest), over the step's samples.

    A response without tokens has no loss to weigh, and does not make the others long.
    """

    min: float = 0.5
    max: float = 1.5

    def __call__(self, batch: RolloutBatch) -> Tensor:
        lengths_B = response_tokens(batch)
        longest = lengths_B.amax()
        shortest = torch.where(lengths_B > 0, lengths_B, longest).amin()
        # An empty response would lie below the shortest; its weight weighs nothing.
        share_B = relative_length(lengths_B.clamp(min=shortest), shortest, longest)
        return self.max - (self.max - self.min) * share_B
