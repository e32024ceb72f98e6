"""Calls of advantage estimators and loss terms that users bring, with checks of what they return.

An error of the user's code ends the run with the key of the part, the step, and the user's lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from roll.algorithms.loss_interface import (
    Estimate,
    PolicyTerms,
    SampleEstimator,
    Samples,
    TokenLoss,
)
from roll.algorithms.own.bases import Advantage, LossTerm, SampleAdvantage
from roll.config.algorithm import LossTermConfig
from roll.config.user_code.calls import OwnCode
from roll.config.user_code.own import OwnPart
from roll.core.batches import RolloutBatch


class OwnTensors(OwnCode):
    """A part that the user brought and that returns tensors."""

    def numbers(self, found: Any, shape: Sequence[int], mask: Tensor | None = None) -> Tensor:
        """Return the numbers that the part returned.

        Args:
            found: what it returned.
            shape: shape that is expected.
            mask: True at the numbers that must be finite; None: all of them.

        Raises:
            RollError: it is no float tensor of this shape, or a number is not finite.
        """
        wanted = f"a float tensor of shape {list(shape)}"
        self.require(isinstance(found, Tensor), type(found).__name__, wanted)
        said = f"a {str(found.dtype).removeprefix('torch.')} tensor of shape {list(found.shape)}"
        self.require(found.is_floating_point() and list(found.shape) == list(shape), said, wanted)
        looked_at = found if mask is None else found[mask]
        wrong = int((~torch.isfinite(looked_at)).sum())
        self.require(not wrong, f"{wrong} numbers that are not finite", "finite numbers")
        return cast(Tensor, found)


def of_step(ids: Sequence[str]) -> str:
    """Return ` on samples of step 3`, as far as the ids of the samples say it."""
    step = ids[0].partition("/")[0] if ids else ""
    return f" on samples of step {step}" if step.isdigit() else ""


@dataclass(frozen=True)
class OwnSampleEstimator(SampleEstimator):
    """Estimator of the user with one advantage per sample."""

    config: SampleAdvantage
    key: str

    def per_sample(self, samples: Samples) -> Tensor:
        """Return the advantage of each sample, float `[B]`; RollError if the user's code fails."""
        code = OwnTensors(self.config, self.key)
        found = code.call(self.config.per_sample, of_step(samples.sample_ids), samples)
        return code.numbers(found, [len(samples)])


@dataclass(frozen=True)
class OwnTokenEstimator:
    """Estimator of the user with an advantage for each token."""

    config: Advantage
    key: str

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Return the estimate of the user's code, 0 outside the loss mask; RollError if it
        fails."""
        code, mask_BT = OwnTensors(self.config, self.key), batch.loss_mask
        found = code.call(self.config, of_step(batch.sample_ids), batch)
        code.require(isinstance(found, Estimate), type(found).__name__, "an Estimate")
        advantages_BT = code.numbers(found.advantages_BT, mask_BT.shape, mask_BT).float()
        returns_BT = found.returns_BT
        if returns_BT is not None:
            returns_BT = code.numbers(returns_BT, mask_BT.shape, mask_BT).float()
        return Estimate(advantages_BT, returns_BT).inside(mask_BT)


@dataclass(frozen=True)
class OwnTerm:
    """Loss term of the user."""

    own: LossTerm
    key: str

    @property
    def config(self) -> LossTermConfig:
        """The options of the term, which are the term itself."""
        return cast(LossTermConfig, self.own)

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Return the loss of the user's code; RollError if it fails. That its numbers are finite
        is not looked at: on a GPU, each micro-batch would wait for it."""
        code, shape = OwnTensors(self.own, self.key), batch.loss_mask.shape
        found = code.call(self.own, of_step(batch.sample_ids), terms, batch)
        code.require(isinstance(found, TokenLoss), type(found).__name__, "a TokenLoss")
        nothing_BT = torch.zeros_like(batch.loss_mask)
        code.numbers(found.loss_BT, shape, nothing_BT)
        return found


class _Prepares(Protocol):
    def prepare(self, batch: RolloutBatch) -> RolloutBatch: ...


@dataclass(frozen=True)
class OwnPreparedTerm(OwnTerm):
    """Loss term of the user that looks at a whole update first."""

    def prepare(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the whole batch with what the term needs; RollError if the user's code fails."""
        code, own = OwnTensors(self.own, self.key), cast(_Prepares, self.own)
        found = code.call(own.prepare, of_step(batch.sample_ids), batch)
        code.require(isinstance(found, RolloutBatch), type(found).__name__, "a RolloutBatch")
        return found


def own_estimator(part: OwnPart, key: str) -> OwnSampleEstimator | OwnTokenEstimator:
    """Return the estimator that the user brought, with checks around it."""
    if isinstance(part, SampleAdvantage):
        return OwnSampleEstimator(part, key)
    assert isinstance(part, Advantage), f"{part.kind} is no advantage estimator"
    return OwnTokenEstimator(part, key)


def own_term(part: OwnPart, key: str) -> OwnTerm:
    """Return the loss term that the user brought, with checks around it."""
    assert isinstance(part, LossTerm), f"{part.kind} is no loss term"
    return (OwnPreparedTerm if hasattr(part, "prepare") else OwnTerm)(part, key)
