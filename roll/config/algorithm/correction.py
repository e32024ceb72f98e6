"""Corrections for the gap between the engine's log-probs of its tokens and the trainer's."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from roll.config.base import Config

RatioLevel = Literal["token", "turn", "sequence", "geometric"]
"""Unit over which one ratio p_trainer / p_engine is computed.

token: one ratio for each token. turn: the product over a run of trained tokens without a gap.
sequence: the product over a sample. geometric: the geometric mean over a sample, exp(mean log
ratio). Of an episode that is trained in several rows, each row counts as a sample here.
"""


class WeightConfig(Config):
    """Importance weights: the policy loss of a token is multiplied by its ratio p_trainer /
    p_engine, kept within bounds.

    Known combinations: truncated at token level is TIS (https://fengyao.notion.site/off-policy-rl);
    masked at token level with bounds 0.5 and 5 is IcePop (https://ringtech.notion.site/icepop);
    masked at sequence level is masked TIS.
    """

    level: RatioLevel = "token"
    """Unit that has one ratio: a token; a turn (the product over a run of trained tokens without a
    gap); a sequence (the product over the sample); or the geometric mean over a sample."""
    upper: float = Field(default=2.0, gt=0)
    """Largest weight."""
    lower: float | None = Field(default=None, gt=0)
    """Smallest weight. null: no lower bound."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Weight of a ratio outside the bounds: the nearest bound (`truncate`) or 0 (`mask`). A token
    of weight 0 still counts in means and in other loss terms such as the KL; use `reject` to
    exclude tokens from these too."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        """Require lower < upper and lower <= 1 <= upper; null sets no bound."""
        _check_bounds(self.lower, self.upper)
        return self


class RejectConfig(Config):
    """Rejection: tokens, turns or samples whose ratio p_trainer / p_engine is outside the bounds
    are taken out of the loss, as if they were not trained."""

    level: RatioLevel = "token"
    """Unit that has one ratio and is taken out as a whole: a token; a turn (a run of trained tokens
    without a gap); or a sample, judged by the product of its tokens' ratios (`sequence`) or by
    their geometric mean (`geometric`)."""
    lower: float | None = Field(default=None, gt=0)
    """Smallest ratio that is kept. null: no lower bound."""
    upper: float | None = Field(default=None, gt=0)
    """Largest ratio that is kept. null: no upper bound."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        """Require at least one bound, lower < upper, and lower <= 1 <= upper."""
        if self.lower is None and self.upper is None:
            raise ValueError("neither lower nor upper is set, so nothing would be rejected")
        _check_bounds(self.lower, self.upper)
        return self


class CorrectionConfig(Config):
    """Correction of the policy loss for the gap between the log-probs of the engine, which
    generated the tokens, and those of the trainer, which are the old log-probs. The two differ
    because of kernels and precision, and because of older weights where generation runs ahead of
    training (https://fengyao.notion.site/off-policy-rl)."""

    weight: WeightConfig | None = None
    """Importance weights for the policy's loss terms. null: no weights."""
    reject: tuple[RejectConfig, ...] = ()
    """Rules, each of which takes tokens, turns or samples out of the loss."""

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        """Require `weight` or at least one rule in `reject`."""
        if self.weight is None and not self.reject:
            raise ValueError(
                "neither weight nor reject is set; set one, or leave the correction out"
            )
        return self


def _check_bounds(lower: float | None, upper: float | None) -> None:
    """Raise ValueError unless lower < upper and lower <= 1 <= upper; None sets no bound."""
    if lower is not None and upper is not None and lower >= upper:
        raise ValueError(f"lower = {lower} is not below upper = {upper}, so no ratio lies between")
    if lower is not None and lower > 1:
        raise ValueError(
            f"lower = {lower} is above 1, the ratio of engines and trainers that agree"
        )
    if upper is not None and upper < 1:
        raise ValueError(
            f"upper = {upper} is below 1, the ratio of engines and trainers that agree"
        )
