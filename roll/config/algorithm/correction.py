"""What to do where the engine's log-probs of its tokens are not the trainer's."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from roll.config.base import Config

RatioLevel = Literal["token", "turn", "sequence", "geometric"]
"""What one ratio p_trainer / p_engine belongs to.

token: each token its own. turn: the product over a run of trained tokens without a gap. sequence:
the product over a sample. geometric: the geometric mean over a sample, exp(mean log ratio).
"""


class WeightConfig(Config):
    """Importance weights: the policy loss of a token times its ratio p_trainer / p_engine, bounded.

    Truncated at token level: TIS (https://fengyao.notion.site/off-policy-rl); masked at token level
    with 0.5 to 5: IcePop (https://ringtech.notion.site/icepop); masked at sequence level: masked
    TIS.
    """

    level: RatioLevel = "token"
    """What one ratio belongs to: a token, a turn (a run of trained tokens without a gap), a
    sequence (the product), or a sequence's geometric mean."""
    upper: float = Field(default=2.0, gt=0)
    """Largest weight."""
    lower: float | None = Field(default=None, gt=0)
    """Smallest weight; null: none."""
    mode: Literal["truncate", "mask"] = "truncate"
    """A ratio outside the bounds becomes the bound (`truncate`) or 0 (`mask`). A token of weight 0
    still counts in the means, and for terms such as the KL; `reject` takes tokens out of them."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        _check_bounds(self.lower, self.upper)
        return self


class RejectConfig(Config):
    """Tokens, turns or samples whose ratio p_trainer / p_engine is outside the bounds leave the
    loss, as if they were not trained."""

    level: RatioLevel = "token"
    """What one ratio belongs to and what leaves: a token, a turn (a run of trained tokens without a
    gap), or a whole sequence by its product or its geometric mean."""
    lower: float | None = Field(default=None, gt=0)
    """Smallest ratio that stays; null: none."""
    upper: float | None = Field(default=None, gt=0)
    """Largest ratio that stays; null: none."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.lower is None and self.upper is None:
            raise ValueError("neither lower nor upper is set, so nothing would be rejected")
        _check_bounds(self.lower, self.upper)
        return self


class CorrectionConfig(Config):
    """Corrects the policy loss for the gap between the engine, which drew the tokens, and the
    trainer, whose log-probs are the old ones: kernels and precision differ, and so do the weights
    where generation runs ahead (https://fengyao.notion.site/off-policy-rl)."""

    weight: WeightConfig | None = None
    """Importance weights of the policy's loss terms; null: none."""
    reject: tuple[RejectConfig, ...] = ()
    """Rules, each of which takes tokens, turns or samples out of the loss."""

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.weight is None and not self.reject:
            raise ValueError(
                "neither weight nor reject is set; set one, or leave the correction out"
            )
        return self


def _check_bounds(lower: float | None, upper: float | None) -> None:
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
