"""Advantage, loss terms and aggregation: tagged unions, one class per choice."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from roll.config.base import Config


class Aggregation(StrEnum):
    """How the losses of tokens become one number."""

    TOKEN_MEAN = "token_mean"
    """Every token counts the same (DAPO, arXiv 2503.14476)."""
    SEQUENCE_MEAN = "sequence_mean"
    """Mean over sequences of the mean over tokens: every sequence counts the same (GRPO)."""
    SEQUENCE_SUM = "sequence_sum"
    """Mean over sequences of the sum over tokens."""
    CONSTANT = "constant"
    """Mean over sequences of the sum of tokens over a constant (Dr.GRPO, arXiv 2503.20783)."""


class GrpoConfig(Config):
    """(reward - group mean) / std (GRPO, arXiv 2402.03300)."""

    kind: Literal["grpo"] = "grpo"
    std: Literal["group", "batch", "none"] = "group"
    """What the centred reward is divided by."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""


class ReinforceConfig(Config):
    """The reward itself, discounted from the last token, minus a baseline (REINFORCE)."""

    kind: Literal["reinforce"] = "reinforce"
    baseline: Literal["none", "batch"] = "none"
    """`batch` subtracts the mean reward of the step."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token, counted back from the last trained token."""


AdvantageConfig = Annotated[GrpoConfig | ReinforceConfig, Field(discriminator="kind")]


class PpoClipConfig(Config):
    """Clipped surrogate (PPO, arXiv 1707.06347; clip_high > clip_low is DAPO's clip-higher)."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    coef: float = 1.0
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped from above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound of the loss for negative advantages, as a multiple of -advantage (arXiv 1912.09729)."""


class KlConfig(Config):
    """Divergence from the reference model, as a loss term (http://joschu.net/blog/kl-approx.html)."""

    kind: Literal["kl"] = "kl"
    coef: float = Field(default=0.001, ge=0)
    estimator: Literal["k1", "k2", "k3"] = "k3"


class EntropyConfig(Config):
    """Entropy bonus: subtracts `coef` times the policy's entropy."""

    kind: Literal["entropy"] = "entropy"
    coef: float = Field(ge=0)


LossTermConfig = Annotated[PpoClipConfig | KlConfig | EntropyConfig, Field(discriminator="kind")]


class AlgorithmConfig(Config):
    """What the policy is trained on: advantage, a sum of loss terms, and their aggregation."""

    advantage: AdvantageConfig = GrpoConfig()
    loss: tuple[LossTermConfig, ...] = Field(default=(PpoClipConfig(),), min_length=1)
    """Terms that are added up, each with its coefficient."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    old_logprobs: Literal["auto", "recompute"] = "auto"
    """The trainer's log-probs before the first update of a step. `auto` skips the extra forward
    pass where a step is one update, since the update's own forward pass gives the same numbers."""
    aggregation_tokens: int | None = Field(default=None, ge=1)
    """Divisor of `constant` aggregation, and of no other; left out: sampling.max_new_tokens."""

    @model_validator(mode="after")
    def _each_term_once(self) -> AlgorithmConfig:
        kinds = [term.kind for term in self.loss]
        twice = sorted({kind for kind in kinds if kinds.count(kind) > 1})
        if twice:
            raise ValueError(f"loss terms listed twice: {', '.join(twice)}")
        return self

    @property
    def needs_reference(self) -> bool:
        return any(term.kind == "kl" for term in self.loss)
