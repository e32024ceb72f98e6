"""Registries of advantage estimators, loss terms and KL estimators, by their names in the config.

The name of an advantage estimator or a loss term is the `kind` of its config class. The fields of
the config class become keyword arguments of the registered class, so a new advantage or loss is one
config class and one registered dataclass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor

from roll.algorithms.loss_interface import AdvantageEstimator, Loss
from roll.core.batches import RolloutBatch
from roll.core.registry import Registry


class LossTerm(Loss, Protocol):
    """Summand of a loss, without its coefficient, which `SumLoss` holds."""

    @property
    def part(self) -> str:
        """Name of the term's part of the loss: `loss/<part>` in the metrics."""
        ...

    @property
    def importance_weighted(self) -> bool:
        """True if `RolloutBatch.importance_weights` multiply the loss of the term.

        This is so for terms that estimate the policy gradient from samples of the engine, and not
        for penalties and imitation.
        """
        ...


@runtime_checkable
class PreparedTerm(LossTerm, Protocol):
    """Loss term that needs a whole update's batch, not yet split over ranks and micro-batches."""

    def prepare(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the whole batch with what the term needs; runs on the driver, once per update."""
        ...


ADVANTAGES: Registry[Callable[..., AdvantageEstimator]] = Registry("advantage estimator")
LOSSES: Registry[Callable[..., LossTerm]] = Registry("loss term")
KL_ESTIMATORS: Registry[Callable[[Tensor, Tensor], Tensor]] = Registry("KL estimator")
