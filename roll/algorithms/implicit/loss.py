"""Loss of a model whose implicit rewards are learned from outcomes."""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn.functional import binary_cross_entropy_with_logits

from roll.algorithms.advantages.rewards import scores
from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.losses.preferences import response_sums, spread
from roll.core.batches import RolloutBatch


@dataclass(frozen=True, slots=True)
class OutcomeLoss:
    """Cross-entropy between success and the logistic function of the sum of a response's implicit
    rewards (PRIME, arXiv 2502.01456, equation 2), on all tokens of the response; see
    `roll.algorithms.losses.preferences` for the mean over responses."""

    beta: float
    """Factor of the log-ratio of the model and the reference."""
    threshold: float
    """Reward above which a response is a success."""

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the loss; raise ValueError without `rewards` or `ref_logprobs`.

        Metrics: `accuracy`, the share of responses whose sum has the right sign; `reward`, the sum
        itself; `success`, the share of successes.
        """
        mask_BT = batch.loss_mask
        ref_BT = batch.require("ref_logprobs", made_by="add_logprobs")
        success_B = (scores(batch) > self.threshold).float()
        ratio_B = response_sums(terms.logprobs_BT, mask_BT) - response_sums(ref_BT, mask_BT)
        reward_B = self.beta * ratio_B
        loss_B = binary_cross_entropy_with_logits(reward_B, success_B, reduction="none")
        seen_B = reward_B.detach()
        # A sum of 0 counts as half right, so that an untrained model has the accuracy 0.5.
        right_B = ((seen_B > 0) == (success_B > 0)).float().masked_fill(seen_B == 0, 0.5)
        return TokenLoss(
            loss_BT=spread(loss_B, mask_BT),
            metrics_B={"accuracy": right_B, "reward": seen_B, "success": success_B},
        )
