"""The length-weighted baseline, which has the least variance on-policy (OPO, arXiv 2505.23585)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.advantages.rewards import total_rewards
from roll.algorithms.loss_interface import Estimate
from roll.algorithms.registries import ADVANTAGES
from roll.algorithms.siblings import Siblings
from roll.core.batches import RolloutBatch


def opo_advantages(rewards_B: Tensor, tokens_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """reward - sum(tokens * reward) / sum(tokens) over its group, float64 `[B]`.

    Args:
        rewards_B: any float dtype.
        tokens_B: trained tokens of each sample; a group without any has advantages that no token
            carries.
        group_ids_B: any integers.
    """
    siblings = Siblings.of(group_ids_B)
    weighted_B = siblings.sum(tokens_B * rewards_B.double())
    return rewards_B - weighted_B / siblings.sum(tokens_B).clamp(min=1)


@ADVANTAGES.register("opo")
@dataclass(frozen=True, kw_only=True)
class Opo:
    """The same advantage on every trained token of a sample; a group of one has advantage 0."""

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Float32 `[B, T]`, zero outside the loss mask; `batch` is the whole step.

        Raises:
            ValueError: the batch has no rewards.
        """
        tokens_B = batch.loss_mask.sum(1)
        advantages_B = opo_advantages(total_rewards(batch), tokens_B, batch.group_ids)
        return Estimate(advantages_B[:, None].float() * batch.loss_mask)
