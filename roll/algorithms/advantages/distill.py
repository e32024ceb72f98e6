"""A teacher's judgement of every token as its advantage (on-policy distillation).

The mean of teacher_logprob - policy_logprob over the policy's own tokens is the negative reverse
KL to the teacher (arXiv 2306.13649, https://thinkingmachines.ai/blog/on-policy-distillation), so a
policy gradient with it pulls the policy towards the teacher, token by token and without discount.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.advantages.group import group_advantages
from roll.algorithms.advantages.rewards import total_rewards
from roll.algorithms.loss_interface import Estimate
from roll.algorithms.registries import ADVANTAGES
from roll.core.batches import RolloutBatch


@ADVANTAGES.register("distill")
@dataclass(frozen=True, kw_only=True)
class Distill:
    """coef * (teacher_logprob - policy_logprob) + mix * GRPO's advantage.

    The policy's log-probs are the trainer's where they are known before the update, else the
    engine's. With several teachers each row holds the log-probs of its own.
    """

    coef: float = 1.0
    mix: float = 0.0
    eps: float = 1e-6

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Float32 `[B, T]`, zero outside the loss mask; `batch` is the whole step.

        Raises:
            ValueError: log-probs of the teacher or the policy are missing, or rewards for `mix`.
        """
        teacher_BT = batch.require("teacher_logprobs", made_by="add_teacher_logprobs")
        gap_BT = teacher_BT.double() - _policy_logprobs(batch).double()
        advantages_BT = self.coef * gap_BT.masked_fill(~batch.loss_mask, 0)
        if self.mix:
            rewarded_B = self.mix * group_advantages(
                total_rewards(batch), batch.group_ids, std="group", eps=self.eps
            )
            advantages_BT = advantages_BT + rewarded_B[:, None] * batch.loss_mask
        return Estimate(advantages_BT.float())


def _policy_logprobs(batch: RolloutBatch) -> Tensor:
    if batch.old_logprobs is not None:
        return batch.old_logprobs
    return batch.require("rollout_logprobs", made_by="assemble")
