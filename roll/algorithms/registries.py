"""Registries of advantage estimators and loss terms by config class, of KL estimators by name.

A new advantage or loss is one config class, which alone has the fields, and one dataclass that is
registered for it and is made of the config alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from roll.algorithms.loss_interface import AdvantageEstimator, Loss
from roll.algorithms.own.calls import own_estimator, own_term
from roll.config.algorithm import LossTermConfig
from roll.config.base import Config
from roll.config.user_code.own import OwnPart
from roll.core.batches import RolloutBatch
from roll.core.registry import Registry
from roll.core.sample_table import SampleTable

P = TypeVar("P")
C = TypeVar("C", bound=Config)
S = TypeVar("S", RolloutBatch, SampleTable)


class PartRegistry(Generic[P]):
    """Parts of one sort, by the classes of their configs; iterates over these classes.

    Registering a class twice raises ValueError.
    """

    def __init__(self, sort: str, own: Callable[[OwnPart, str], P] | None = None) -> None:
        """Begin without parts.

        Args:
            sort: noun for a part in messages, such as `loss term`.
            own: function that makes a part of one that the user brought, and of its key in the run
                file; None if users cannot bring any.
        """
        self.sort = sort
        self._own = own
        self._makers: dict[type[Config], Callable[[Any], P]] = {}

    def register(self, config_class: type[C]) -> Callable[[Callable[[C], P]], Callable[[C], P]]:
        """Register the decorated class or function, which makes a part of its config."""

        def add(make: Callable[[C], P]) -> Callable[[C], P]:
            if config_class in self._makers:
                raise ValueError(f"{self.sort} {config_class.__name__} is registered twice")
            self._makers[config_class] = make
            return make

        return add

    def build(self, config: Config, key: str = "") -> P:
        """Build the part that the config describes.

        Args:
            key: place of the config in the run file, for messages about the user's code.

        Raises:
            TypeError: no part is registered for the class of the config.
        """
        if isinstance(config, OwnPart) and self._own is not None:
            # A copy, so that what a part keeps between steps begins anew.
            return self._own(config.model_copy(deep=True), key or self.sort)
        if type(config) not in self._makers:
            raise TypeError(f"no {self.sort} is registered for {type(config).__name__}")
        return self._makers[type(config)](config)

    def __iter__(self) -> Iterator[type[Config]]:
        return iter(self._makers)


class LossTerm(Loss, Protocol):
    """Summand of a loss, without its coefficient, by which `SumLoss` multiplies it."""

    @property
    def config(self) -> LossTermConfig: ...


@runtime_checkable
class PreparedTerm(LossTerm, Protocol):
    """Loss term that needs a whole update's batch, not yet split over ranks and micro-batches."""

    def prepare(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the whole batch with what the term needs; runs on the driver, once per update."""
        ...


@runtime_checkable
class ChoosingTerm(LossTerm, Protocol):
    """Loss term that trains on a choice of the samples of a step."""

    def choose(self, samples: S) -> S:
        """Return the chosen rows of all samples of a step; runs on the driver, once per step."""
        ...


ADVANTAGES: PartRegistry[AdvantageEstimator] = PartRegistry("advantage estimator", own_estimator)
LOSSES: PartRegistry[LossTerm] = PartRegistry("loss term", own_term)
KL_ESTIMATORS: Registry[Callable[[Tensor, Tensor], Tensor]] = Registry("KL estimator")
