"""What passes between a forward pass and a loss.

Axis letters: B samples, T tokens. Losses return unreduced `[B, T]` tensors; reduction is one sum
with `RolloutBatch.token_weights`, so no split over micro-batches, ranks or packing changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

from roll.core.batches import RolloutBatch, TrainBatch


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """What a forward pass gives. Position t describes token t; position 0 is 0."""

    logprobs_BT: Tensor
    """Natural log of the probability of token t given the tokens before it."""
    entropy_BT: Tensor | None = None
    """Entropy, in nats, of the distribution that token t was drawn from."""
    divergence_BT: Tensor | None = None
    """Of that distribution from the teacher's, in nats; where there are teachers."""


@dataclass(frozen=True, slots=True)
class ValueTerms:
    """What a critic's forward pass gives."""

    values_BT: Tensor
    """Expected return before token t is written, given the tokens before it; 0 at position 0."""


@dataclass(frozen=True, slots=True)
class ScoreTerms:
    """What a reward model's forward pass gives."""

    scores_BT: Tensor
    """Score of the text up to and including token t; 0 at position 0."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss before its reduction."""

    loss_BT: Tensor
    """Unreduced; masked by its weights, not here."""
    parts_BT: dict[str, Tensor] = field(default_factory=dict)
    """Named shares of the loss, reduced with the same weights (`loss/policy`)."""
    metrics_BT: dict[str, Tensor] = field(default_factory=dict)
    """Reported as means over trained tokens (`clip_fraction`); detached."""
    maxima_BT: dict[str, Tensor] = field(default_factory=dict)
    """Reported as the largest value of any trained token; detached."""
    metrics_B: dict[str, Tensor] = field(default_factory=dict)
    """Reported as means over rows that have trained tokens (`accuracy`); detached."""


T_contra = TypeVar("T_contra", contravariant=True)
B_contra = TypeVar("B_contra", bound=TrainBatch, contravariant=True)


class TermsLoss(Protocol[T_contra, B_contra]):
    """A per-token loss of one forward pass."""

    def __call__(self, terms: T_contra, batch: B_contra) -> TokenLoss: ...


Loss = TermsLoss[PolicyTerms, RolloutBatch]
"""Of a policy."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an advantage estimator finds."""

    advantages_BT: Tensor
    """Float32; zero outside the loss mask."""
    returns_BT: Tensor | None = None
    """Float32; what the critic is trained towards, zero outside the loss mask. Estimators without
    a critic have none."""

    def inside(self, mask_BT: Tensor) -> Estimate:
        """Of fewer tokens: zero outside of `mask_BT`."""
        returns_BT = self.returns_BT
        return Estimate(
            self.advantages_BT.masked_fill(~mask_BT, 0),
            None if returns_BT is None else returns_BT.masked_fill(~mask_BT, 0),
        )


class AdvantageEstimator(Protocol):
    """Rewards to advantages; sees the whole step's batch."""

    def __call__(self, batch: RolloutBatch) -> Estimate: ...
