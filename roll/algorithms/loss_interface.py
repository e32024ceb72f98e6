"""Data types and protocols between a forward pass, a loss and an advantage estimator.

Axis letters: B samples, T tokens. Losses return unreduced `[B, T]` tensors. The reduction is one
sum weighted by `RolloutBatch.token_weights`, so the result does not depend on the split over
micro-batches, ranks or packed rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from roll.core.batches import RolloutBatch, TrainBatch
from roll.core.sample_table import SampleTable


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """Results of a policy's forward pass. Position t describes token t; position 0 is 0."""

    logprobs_BT: Tensor
    """Natural log of the probability of token t given the tokens before it, float32 `[B, T]`."""
    entropy_BT: Tensor | None = None
    """Entropy, in nats, of the distribution that token t was drawn from, float32 `[B, T]`; None
    unless it was asked for."""
    divergence_BT: Tensor | None = None
    """Divergence of that distribution from the teacher's, in nats, float32 `[B, T]`; None without
    teachers."""
    squares_BT: Tensor | None = None
    """Sum of the squared probabilities of that distribution, float32 `[B, T]`, without gradient;
    None unless it was asked for."""


@dataclass(frozen=True, slots=True)
class ValueTerms:
    """Results of a critic's forward pass."""

    values_BT: Tensor
    """Expected return from token t on, given the tokens before it; 0 at position 0."""


@dataclass(frozen=True, slots=True)
class ScoreTerms:
    """Results of a reward model's forward pass."""

    scores_BT: Tensor
    """Score of the text up to and including token t; 0 at position 0."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss per token, before its reduction to one number."""

    loss_BT: Tensor
    """Loss of each token, float32 `[B, T]`; the token weights, applied later, mask it."""
    parts_BT: dict[str, Tensor] = field(default_factory=dict)
    """Summands of the loss by name, reduced with the same weights; `policy` is `loss/policy` in the
    metrics."""
    metrics_BT: dict[str, Tensor] = field(default_factory=dict)
    """Metrics that are reported as means over trained tokens (`clip_fraction`); detached."""
    maxima_BT: dict[str, Tensor] = field(default_factory=dict)
    """Metrics that are reported as the maximum over trained tokens; detached."""
    metrics_B: dict[str, Tensor] = field(default_factory=dict)
    """Metrics that are reported as means over rows with trained tokens (`accuracy`); detached."""


T_contra = TypeVar("T_contra", contravariant=True)
B_contra = TypeVar("B_contra", bound=TrainBatch, contravariant=True)


class TermsLoss(Protocol[T_contra, B_contra]):
    """Function from the results of one forward pass and its batch to a loss per token."""

    def __call__(self, terms: T_contra, batch: B_contra) -> TokenLoss:
        """Return the loss; raise ValueError if `terms` or `batch` lack something that it needs."""
        ...


Loss = TermsLoss[PolicyTerms, RolloutBatch]
"""Loss of a policy."""


@runtime_checkable
class ReadsEntropy(Protocol):
    """Loss that says whether it reads the entropies of a policy."""

    @property
    def reads_entropy(self) -> bool: ...


def reads_entropy(loss: object) -> bool:
    """Return whether a loss reads `PolicyTerms.entropy_BT`; one that does not say so does not."""
    return isinstance(loss, ReadsEntropy) and loss.reads_entropy


@dataclass(frozen=True, slots=True)
class Estimate:
    """Result of an advantage estimator."""

    advantages_BT: Tensor
    """Advantages, float32 `[B, T]`, zero outside the loss mask."""
    returns_BT: Tensor | None = None
    """Targets of the critic, float32 `[B, T]`, zero outside the loss mask; None for estimators
    without a critic."""

    def inside(self, mask_BT: Tensor) -> Estimate:
        """Return the estimate with zeros outside `mask_BT`."""
        returns_BT = self.returns_BT
        return Estimate(
            self.advantages_BT.masked_fill(~mask_BT, 0),
            None if returns_BT is None else returns_BT.masked_fill(~mask_BT, 0),
        )


class AdvantageEstimator(Protocol):
    """Function from rewards to advantages; it must be called with the batch of a whole step."""

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Return the advantages of a step; ValueError if the batch lacks rewards or what else is
        needed."""
        ...


Samples = RolloutBatch | SampleTable
"""Samples with or without their tokens."""


class SampleEstimator(ABC):
    """Advantage estimator with one advantage per sample, the same on all its trained tokens.

    It needs no tokens, so the driver need not have them.
    """

    @property
    def spreads(self) -> bool:
        """True if the settings of the estimator give all tokens of a sample the same advantage."""
        return True

    @abstractmethod
    def per_sample(self, samples: Samples) -> Tensor:
        """Return the advantage of each sample of a whole step, float64 `[B]`.

        Raises:
            ValueError: rewards are missing.
        """

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Compute the advantages of all tokens; raise ValueError if rewards are missing."""
        return Estimate(self.per_sample(batch)[:, None].float() * batch.loss_mask)
