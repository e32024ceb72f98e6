"""Bases of advantage estimators and loss terms that users bring; `roll.extend` exports them.

The options of a part are fields of its class, and are set in the run file beside `kind`. A part
without a method, or with an option of a wrong type, is refused when the file is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from roll.algorithms.loss_interface import Estimate, PolicyTerms, Samples, TokenLoss
from roll.config.algorithm.advantages import OwnAdvantageConfig
from roll.config.algorithm.losses import OwnLossConfig, OwnPolicyLossConfig
from roll.core.batches import RolloutBatch


class SampleAdvantage(OwnAdvantageConfig, ABC):
    """Advantage estimator that gives all trained tokens of a sample the same advantage.

    It needs no tokens, so the driver does not fetch them. `needs` says what else a run must have,
    such as `frozenset({Need.SIBLINGS})` for two or more samples per prompt.
    """

    @abstractmethod
    def per_sample(self, samples: Samples) -> Tensor:
        """Return the advantage of each sample, float `[B]`, finite.

        Args:
            samples: all samples of a step that have a reward. `samples.rewards` is the total
                reward, float32 `[B]`; `samples.group_ids`, int64 `[B]`, is equal for samples of
                one prompt, which need not be adjacent; `samples.trained_tokens()` counts the
                tokens that the policy wrote, int64 `[B]`; `samples.tags` are those of the prompts.
        """


class Advantage(OwnAdvantageConfig, ABC):
    """Advantage estimator that gives each token an advantage of its own.

    `needs` says what a run must have: `frozenset({Need.CRITIC})` for `batch.values`,
    `frozenset({Need.REFERENCE})` for `batch.ref_logprobs`, and that with `Need.PROCESS_REWARD` for
    `batch.implicit_rewards`.
    """

    @abstractmethod
    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Return advantages, float `[B, T]`, finite where `batch.loss_mask` is True; and, for a
        critic, the returns that it learns to predict.

        Args:
            batch: all samples of a step that have a reward. `batch.rewards` is float32 `[B]`,
                `batch.loss_mask` bool `[B, T]`, True at the tokens that the policy wrote;
                `batch.token_rewards` float32 `[B, T]`, or None if no token has a reward.
        """


class LossTerm(OwnLossConfig, ABC):
    """Loss term that is added to the others, times its `coef`.

    A micro-batch holds any rows of an update, in any order, with any padding; the loss of an update
    is the sum over all of its tokens of loss times token weight. So the loss of a token must not
    depend on other rows. `reads_advantages = False` says that the term uses no advantages;
    `reads_entropy = False`, that it uses no entropies; `whole_sequences = True`, that the loss of a
    token depends on other tokens of its row.
    """

    @abstractmethod
    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Return the loss of each token, float32 `[B, T]`, with a gradient to `terms`, and metrics,
        detached.

        Args:
            terms: `terms.logprobs_BT`, natural log of the probability of each token under the
                policy that is trained; `terms.entropy_BT`, its entropy in nats, unless
                `reads_entropy` is False.
            batch: rows of the update. `batch.advantages`, `batch.old_logprobs` (None with one
                update per step: those of `terms`, detached, then) and `batch.ref_logprobs` (None
                without a reference) are float32 `[B, T]`.
        """


class PolicyLoss(OwnPolicyLossConfig, LossTerm, ABC):
    """Loss term that estimates the policy gradient from samples of the engine; a run has at most
    one. Importance weights (`algorithm.correction`) multiply its loss."""
