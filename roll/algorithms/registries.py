"""Names in the config to maths: each registry is keyed by the `kind` of its config class.

A config field of the same name becomes a keyword argument of the registered thing, so a new
advantage or loss is one config class and one registered dataclass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor

from roll.algorithms.loss_interface import AdvantageEstimator, Loss
from roll.core.batches import RolloutBatch
from roll.core.registry import Registry


class LossTerm(Loss, Protocol):
    """One summand of a loss; its coefficient belongs to `SumLoss`."""

    @property
    def part(self) -> str:
        """Name of its share of the loss: `loss/<part>` in the metrics."""
        ...

    @property
    def importance_weighted(self) -> bool:
        """Whether `RolloutBatch.importance_weights` multiply its loss: True for what estimates the
        policy gradient from samples of the engine, False for penalties and imitation."""
        ...


@runtime_checkable
class PreparedTerm(LossTerm, Protocol):
    """A term that must see the whole update before it is split over ranks and micro-batches."""

    def prepare(self, batch: RolloutBatch) -> RolloutBatch:
        """The update's batch with what the term needs; run once, on the driver."""
        ...


ADVANTAGES: Registry[Callable[..., AdvantageEstimator]] = Registry("advantage estimator")
LOSSES: Registry[Callable[..., LossTerm]] = Registry("loss term")
KL_ESTIMATORS: Registry[Callable[[Tensor, Tensor], Tensor]] = Registry("KL estimator")
