"""Shaping of rewards, samples and advantages: tagged unions, one class per choice."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from roll.config.algorithm.needs import Choice, Need
from roll.config.base import Config

Level = Literal["none", "group", "batch", "running"]

HORIZON = 10_000


class ClipRewardConfig(Choice):
    """min(max(reward, low), high)."""

    kind: Literal["clip"] = "clip"
    low: float | None = None
    """Smallest reward; left out: no bound."""
    high: float | None = None
    """Largest reward; left out: no bound."""

    @model_validator(mode="after")
    def _bounds_bound_something(self) -> Self:
        if self.low is None and self.high is None:
            raise ValueError("clips nothing without a bound; set `low`, `high` or both")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low = {self.low:g} must lie below high = {self.high:g}")
        return self


class ScaleRewardConfig(Choice):
    """factor * reward + shift."""

    kind: Literal["scale"] = "scale"
    factor: float = Field(default=1.0, gt=0)
    """Multiplies the reward first."""
    shift: float = 0.0
    """Added afterwards, in units of the scaled reward."""

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.factor == 1 and self.shift == 0:
            raise ValueError("factor 1 and shift 0 change nothing; set one of them")
        return self


class NormalizeRewardConfig(Choice):
    """(reward - mean) / (std + eps), each moment of a level of its own (Lite PPO compares the
    levels, arXiv 2508.08221).

    For advantages that do not normalise by themselves (`reinforce`, `rloo`, `gae`), and rewards
    whose scale drifts.
    """

    kind: Literal["normalize"] = "normalize"
    mean: Level
    """Subtracted: the mean of the siblings (`group`), of the step (`batch`), of all steps so far,
    this one and all tags included (`running`, kept in checkpoints), or nothing (`none`)."""
    std: Level
    """Divided by: the unbiased standard deviation of the same choices, around the mean of its own
    level. Where there is no spread (equal rewards, a single sample) nothing is divided."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""


class OverlongPenaltyConfig(Choice):
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13): adds
    -penalty * clip((length - (max_tokens - buffer_tokens)) / buffer_tokens, 0, 1).

    Where responses run into the length limit: a warning before they are cut off.
    """

    kind: Literal["overlong_penalty"] = "overlong_penalty"
    max_tokens: int | None = Field(default=None, ge=1)
    """Response tokens from which on the whole penalty is due; left out: sampling.max_new_tokens."""
    buffer_tokens: int | None = Field(default=None, ge=1)
    """The penalty grows linearly over the last so many of `max_tokens`; left out: a fifth of them,
    as in the paper (4096 of 20480)."""
    penalty: float = Field(default=1.0, gt=0)
    """What a response of max_tokens loses, in units of the reward."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if None not in (self.max_tokens, self.buffer_tokens):
            self.limits(0)
        return self

    def limits(self, max_new_tokens: int) -> tuple[int, int]:
        """`max_tokens` and `buffer_tokens` of a run.

        Raises:
            ValueError: the buffer is more than the whole.
        """
        longest = self.max_tokens or max_new_tokens
        buffer = self.buffer_tokens or max(1, longest // 5)
        if buffer > longest:
            raise ValueError(
                f"buffer_tokens = {buffer} are the last of max_tokens = {longest} and cannot be "
                "more"
            )
        return longest, buffer


class LengthPenaltyConfig(Choice):
    """Length reward within a group (Kimi k1.5, arXiv 2501.12599, section 2.3.3): adds coef * x with
    x = 0.5 - (length - shortest) / (longest - shortest) for samples that pass, min(0, x) for
    others; 0 where all siblings have the same length.

    Where responses are longer than they need to be; the paper switches it on late in training.
    """

    kind: Literal["length_penalty"] = "length_penalty"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.SIBLINGS})
    coef: float = Field(default=1.0, gt=0)
    """Weight of the length reward, which lies within +-0.5."""
    pass_score: float = 1.0
    """A sample passes when its reward, before any shaping, is at least this."""


RewardShapingConfig = Annotated[
    ClipRewardConfig
    | ScaleRewardConfig
    | NormalizeRewardConfig
    | OverlongPenaltyConfig
    | LengthPenaltyConfig,
    Field(discriminator="kind"),
]


class OverlongMaskConfig(Choice):
    """Truncated responses are not trained on (overlong filtering of DAPO, arXiv 2503.14476); they
    still count among their siblings' rewards.

    Where the limit is too short to judge what was cut off.
    """

    kind: Literal["overlong"] = "overlong"


class DifficultyMaskConfig(Choice):
    """Prompts that are too hard or too easy are not trained on: low <= mean reward of the group
    <= high. Unlike a rollout filter it draws no other prompts in their place."""

    kind: Literal["difficulty"] = "difficulty"
    low: float = 0.1
    """Smallest mean reward of a group, before any shaping, that is trained on."""
    high: float = 0.95
    """Largest mean reward of a group, before any shaping, that is trained on."""

    @model_validator(mode="after")
    def _bounds_leave_something(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low = {self.low:g} must not lie above high = {self.high:g}")
        return self


MaskConfig = Annotated[OverlongMaskConfig | DifficultyMaskConfig, Field(discriminator="kind")]


class _WeightConfig(Choice):
    min: float = Field(default=0.5, gt=0)
    """Smallest weight of a sample, relative to the others."""
    max: float = Field(default=1.5, gt=0)
    """Largest weight of a sample, relative to the others."""

    @model_validator(mode="after")
    def _bounds_differ(self) -> Self:
        if self.min >= self.max:
            raise ValueError(
                f"min = {self.min:g} must lie below max = {self.max:g}; equal weights weigh nothing"
            )
        return self


class DifficultyWeightConfig(_WeightConfig):
    """Harder prompts weigh more: min + (max - min) * (1 - mean reward of the group, clipped to
    [0, 1]); a heuristic without a paper, for rewards between 0 and 1."""

    kind: Literal["difficulty"] = "difficulty"


class LengthWeightConfig(_WeightConfig):
    """Shorter responses weigh more: max - (max - min) * (length - shortest) / (longest - shortest)
    over the samples of the step; a heuristic without a paper."""

    kind: Literal["length"] = "length"


SampleWeightConfig = Annotated[
    DifficultyWeightConfig | LengthWeightConfig, Field(discriminator="kind")
]


class WhitenAdvantageConfig(Choice):
    """(advantage - mean) / (std + eps) over all trained tokens of the step (PPO in practice,
    arXiv 2005.12729; REINFORCE++, arXiv 2501.03262).

    For advantages of a critic, whose scale is that of the rewards and changes as they do.
    """

    kind: Literal["whiten"] = "whiten"
    mean: bool = True
    """False keeps the mean and only divides, so that no advantage changes its sign."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""


class ClipAdvantageConfig(Choice):
    """min(max(advantage, -limit), limit)."""

    kind: Literal["clip"] = "clip"
    limit: float = Field(gt=0)
    """Largest absolute advantage of a token."""


AdvantageShapingConfig = Annotated[
    WhitenAdvantageConfig | ClipAdvantageConfig, Field(discriminator="kind")
]


class KlInRewardConfig(Config):
    """Every token is paid -coef * KL(policy || reference), on top of the reward (InstructGPT,
    arXiv 2203.02155); with a `target` the coefficient adapts (Ziegler et al., arXiv 1909.08593):
    coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * samples / horizon after every step.

    That is the controller of the paper's code; the paper itself writes 0.1 for samples / horizon.
    For rewards that can be gamed, such as those of a model.
    """

    coef: float = Field(default=0.001, gt=0)
    """Reward lost per nat; where it adapts, the coefficient of the first step."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Of the divergence; k1 is the one whose policy gradient is that of the divergence."""
    target: float | None = Field(default=None, gt=0)
    """Divergence to hold, in nats per token (mean over samples of the mean over their tokens; the
    paper's is of a whole response); left out: the coefficient stays."""
    horizon: int = Field(default=HORIZON, ge=1)
    """Samples over which a coefficient that adapts changes by about a fifth, if the divergence is
    off its target by a fifth or more."""

    @model_validator(mode="after")
    def _horizon_has_a_target(self) -> Self:
        if self.target is None and self.horizon != HORIZON:
            raise ValueError("`horizon` has no effect without `target`; set that or drop this")
        return self
