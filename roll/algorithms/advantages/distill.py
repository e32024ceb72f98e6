"""Advantages from a teacher's log-probs of the sampled tokens (on-policy distillation).

The mean of teacher_logprob - policy_logprob over the policy's own tokens is the negative reverse
KL to the teacher (arXiv 2306.13649, https://thinkingmachines.ai/blog/on-policy-distillation). With
this difference as advantage, a policy gradient moves the policy towards the teacher, token by token
and without discount.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.advantages.group import group_advantages
from roll.algorithms.advantages.rewards import total_rewards
from roll.algorithms.loss_interface import Estimate
from roll.algorithms.registries import ADVANTAGES
from roll.config.algorithm.advantages import DistillConfig
from roll.core.batches import RolloutBatch


@ADVANTAGES.register(DistillConfig)
@dataclass(frozen=True)
class Distill:
    """Advantage coef * (teacher_logprob - policy_logprob) + mix * (advantage of GRPO).

    The policy's log-probs are the trainer's `old_logprobs` if they are set, otherwise the engine's.
    With several teachers, each row holds the log-probs of its own teacher.
    """

    config: DistillConfig

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Compute the advantages.

        Raises:
            ValueError: log-probs of the teacher or the policy are missing, or `mix` is not 0 and
                rewards are missing.
        """
        config = self.config
        teacher_BT = batch.require("teacher_logprobs", made_by="add_teacher_outputs")
        gap_BT = teacher_BT.double() - _policy_logprobs(batch).double()
        advantages_BT = config.coef * gap_BT.masked_fill(~batch.loss_mask, 0)
        if config.mix:
            rewarded_B = config.mix * group_advantages(
                total_rewards(batch), batch.group_ids, std="group", eps=config.eps
            )
            advantages_BT = advantages_BT + rewarded_B[:, None] * batch.loss_mask
        return Estimate(advantages_BT.float())


def _policy_logprobs(batch: RolloutBatch) -> Tensor:
    """Return `old_logprobs` if they are set, otherwise the engine's; ValueError without either."""
    if batch.old_logprobs is not None:
        return batch.old_logprobs
    return batch.require("rollout_logprobs", made_by="assemble")
