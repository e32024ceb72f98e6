"""What passes between a forward pass and a loss.

Axis letters: B samples, T tokens. Losses return unreduced `[B, T]` tensors; reduction is one sum
with `RolloutBatch.token_weights`, so no split over micro-batches, ranks or packing changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from roll.core.batches import RolloutBatch


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """What a forward pass gives. Position t describes token t; position 0 is 0."""

    logprobs_BT: Tensor
    """Natural log of the probability of token t given the tokens before it."""
    entropy_BT: Tensor | None = None
    """Entropy, in nats, of the distribution that token t was drawn from."""


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


class Loss(Protocol):
    """A per-token loss of one forward pass."""

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss: ...


class AdvantageEstimator(Protocol):
    """Rewards to advantages `[B, T]`, zero outside the loss mask; sees the whole step's batch."""

    def __call__(self, batch: RolloutBatch) -> Tensor: ...
