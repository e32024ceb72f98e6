"""Shaping of rewards, samples and advantages: tagged unions, one class per choice."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from roll.config.algorithm.needs import Choice, Need
from roll.config.base import Config
from roll.config.user_code.own import OrOwn, OwnPart

Level = Literal["none", "group", "batch", "running"]

HORIZON = 10_000


class ClipRewardConfig(Choice):
    """Clipped reward: min(max(reward, low), high)."""

    kind: Literal["clip"] = "clip"
    low: float | None = None
    """Smallest reward. If left out: no lower bound."""
    high: float | None = None
    """Largest reward. If left out: no upper bound."""

    @model_validator(mode="after")
    def _bounds_bound_something(self) -> Self:
        """Require at least one bound, and low < high if both are set."""
        if self.low is None and self.high is None:
            raise ValueError("clips nothing without a bound; set `low`, `high` or both")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low = {self.low:g} must lie below high = {self.high:g}")
        return self


class ScaleRewardConfig(Choice):
    """Scaled and shifted reward: factor * reward + shift."""

    kind: Literal["scale"] = "scale"
    factor: float = Field(default=1.0, gt=0)
    """Factor of the reward, applied before `shift`."""
    shift: float = 0.0
    """Number added to the scaled reward."""

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        """Refuse a factor of 1 with a shift of 0."""
        if self.factor == 1 and self.shift == 0:
            raise ValueError("factor 1 and shift 0 change nothing; set one of them")
        return self


class NormalizeRewardConfig(Choice):
    """Normalised reward: (reward - mean) / (std + eps), where mean and std each have their own
    level (Lite PPO compares the levels, arXiv 2508.08221).

    For advantages that do not normalise rewards themselves (`reinforce`, `rloo`, `gae`), and for
    rewards whose scale drifts.
    """

    kind: Literal["normalize"] = "normalize"
    mean: Level
    """Level of the mean that is subtracted: of the samples of the same prompt (`group`), of the
    step (`batch`), of all steps so far (`running`, which includes this step and all tags and is
    kept in checkpoints), or nothing (`none`)."""
    std: Level
    """Level of the unbiased standard deviation that the reward is divided by, with the same choices
    as `mean`; it is taken around the mean of its own level. If all rewards are equal or there is
    only one sample, nothing is divided."""
    eps: float = Field(default=1e-6, gt=0)
    """Number added to the standard deviation before the division."""


class OverlongPenaltyConfig(Choice):
    """Penalty on overlong responses (soft overlong punishment of DAPO, arXiv 2503.14476, eq. 13):
    adds -penalty * clip((length - (max_tokens - buffer_tokens)) / buffer_tokens, 0, 1).

    For runs whose responses reach the length limit: the penalty grows before a response is cut off.
    """

    kind: Literal["overlong_penalty"] = "overlong_penalty"
    max_tokens: int | None = Field(default=None, ge=1)
    """Length of a response, in tokens that the policy wrote, from which the full penalty applies.
    If left out: the `sampling.max_new_tokens` of its tag; of episodes data.max_episode_tokens, and
    then all that is said in an episode counts."""
    buffer_tokens: int | None = Field(default=None, ge=1)
    """Number of tokens before `max_tokens` over which the penalty grows linearly. If left out: a
    fifth of `max_tokens`, as in the paper (4096 of 20480)."""
    penalty: float = Field(default=1.0, gt=0)
    """Largest penalty, in units of the reward: a response of `max_tokens` gets it in full."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        """Require buffer_tokens <= max_tokens if `max_tokens` is set."""
        if self.max_tokens is not None:
            self.limits()
        return self

    def within(self, max_new_tokens: int) -> Self:
        """Return a copy with `max_tokens` filled in if it was left out.

        Nothing is checked: `limits` of the copy raises ValueError if `buffer_tokens` is more.

        Args:
            max_new_tokens: largest number of tokens of a sample.
        """
        return self.model_copy(update={"max_tokens": self.max_tokens or max_new_tokens})

    def limits(self) -> tuple[int, int]:
        """Return `max_tokens` and `buffer_tokens`; without the latter, a fifth of `max_tokens`, at
        least 1.

        Raises:
            ValueError: `max_tokens` is left out (see `within`), or smaller than `buffer_tokens`.
        """
        longest = self.max_tokens
        if longest is None:
            raise ValueError("max_tokens is left out; fill it in with `within`")
        buffer = self.buffer_tokens or max(1, longest // 5)
        if buffer > longest:
            raise ValueError(
                f"buffer_tokens = {buffer} are the last of max_tokens = {longest} and cannot be "
                "more"
            )
        return longest, buffer


class LengthPenaltyConfig(Choice):
    """Reward for short responses within a group (Kimi k1.5, arXiv 2501.12599, section 2.3.3): adds
    coef * x for samples that pass and coef * min(0, x) for others, with x = 0.5 - (length -
    shortest) / (longest - shortest). Adds 0 if all samples of the group have the same length.

    For responses that are longer than they need to be. The paper switches this on late in training.
    """

    kind: Literal["length_penalty"] = "length_penalty"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.SIBLINGS})
    coef: float = Field(default=1.0, gt=0)
    """Factor of the length reward, which is between -0.5 and 0.5."""
    pass_score: float = 1.0
    """Reward, before any shaping, from which on a sample passes."""


class OwnRewardShapingConfig(OwnPart, Choice):
    """Base of the shapings that users bring; see `roll.algorithms.own.shaping`."""

    sort: ClassVar[str] = "reward shaping"
    place: ClassVar[str] = "algorithm.reward_shaping"


RewardShapingConfig = Annotated[
    ClipRewardConfig
    | ScaleRewardConfig
    | NormalizeRewardConfig
    | OverlongPenaltyConfig
    | LengthPenaltyConfig,
    Field(discriminator="kind"),
    OrOwn(OwnRewardShapingConfig, "roll.extend.RewardShaping"),
]


class OverlongMaskConfig(Choice):
    """Mask of truncated responses: these are not trained on (overlong filtering of DAPO, arXiv
    2503.14476), but their rewards still count in the statistics of their group.

    For length limits that are too short to judge a truncated response.
    """

    kind: Literal["overlong"] = "overlong"


class DifficultyMaskConfig(Choice):
    """Mask of prompts that are too hard or too easy: a group is trained on if low <= mean reward of
    the group <= high. Unlike a rollout filter, this draws no other prompts in their place."""

    kind: Literal["difficulty"] = "difficulty"
    low: float = 0.1
    """Smallest mean reward of a group, before any shaping, that is trained on."""
    high: float = 0.95
    """Largest mean reward of a group, before any shaping, that is trained on."""

    @model_validator(mode="after")
    def _bounds_leave_something(self) -> Self:
        """Require low <= high."""
        if self.low > self.high:
            raise ValueError(f"low = {self.low:g} must not lie above high = {self.high:g}")
        return self


class SpreadMaskConfig(Choice):
    """Mask that keeps the groups whose rewards vary most, by their standard deviation (StarPO-S of
    RAGEN, arXiv 2504.20073): where all samples fare alike, little can be learned.

    For agents, whose groups often have equal rewards. Unlike a rollout filter, this draws no other
    prompts in their place.
    """

    kind: Literal["spread"] = "spread"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.SIBLINGS})
    keep: float = Field(default=0.25, gt=0, lt=1)
    """Share of the groups of a step that are trained on, rounded up to whole groups. Of groups that
    vary equally, the first are kept."""


class OwnMaskConfig(OwnPart, Choice):
    """Base of the masks that users bring; see `roll.algorithms.own.shaping`."""

    sort: ClassVar[str] = "mask"
    place: ClassVar[str] = "algorithm.masks"


MaskConfig = Annotated[
    OverlongMaskConfig | DifficultyMaskConfig | SpreadMaskConfig,
    Field(discriminator="kind"),
    OrOwn(OwnMaskConfig, "roll.extend.SampleMask"),
]


class _WeightConfig(Choice):
    min: float = Field(default=0.5, gt=0)
    """Smallest weight of a sample, relative to the others."""
    max: float = Field(default=1.5, gt=0)
    """Largest weight of a sample, relative to the others."""

    @model_validator(mode="after")
    def _bounds_differ(self) -> Self:
        """Require min < max."""
        if self.min >= self.max:
            raise ValueError(
                f"min = {self.min:g} must lie below max = {self.max:g}; equal weights weigh nothing"
            )
        return self


class DifficultyWeightConfig(_WeightConfig):
    """Higher weight for harder prompts: min + (max - min) * (1 - mean reward of the group, clipped
    to [0, 1]). A heuristic without a paper, for rewards between 0 and 1."""

    kind: Literal["difficulty"] = "difficulty"


class LengthWeightConfig(_WeightConfig):
    """Higher weight for shorter responses: max - (max - min) * (length - shortest) / (longest -
    shortest) over the samples of the step. A heuristic without a paper."""

    kind: Literal["length"] = "length"


class OwnSampleWeightConfig(OwnPart, Choice):
    """Base of the weights that users bring; see `roll.algorithms.own.shaping`."""

    sort: ClassVar[str] = "sample weight"
    place: ClassVar[str] = "algorithm.sample_weights"


SampleWeightConfig = Annotated[
    DifficultyWeightConfig | LengthWeightConfig,
    Field(discriminator="kind"),
    OrOwn(OwnSampleWeightConfig, "roll.extend.SampleWeight"),
]


class WhitenAdvantageConfig(Choice):
    """Whitened advantage: (advantage - mean) / (std + eps) over all trained tokens of the step (PPO
    in practice, arXiv 2005.12729; REINFORCE++, arXiv 2501.03262).

    For the advantages of a critic, which have the scale of the rewards and change with that scale.
    """

    kind: Literal["whiten"] = "whiten"
    mean: bool = True
    """Subtract the mean. False only divides by the std, so that no advantage changes its sign."""
    eps: float = Field(default=1e-6, gt=0)
    """Number added to the standard deviation before the division."""


class ClipAdvantageConfig(Choice):
    """Clipped advantage: min(max(advantage, -limit), limit)."""

    kind: Literal["clip"] = "clip"
    limit: float = Field(gt=0)
    """Largest absolute advantage of a token."""


class OwnAdvantageShapingConfig(OwnPart, Choice):
    """Base of the shapings that users bring; see `roll.algorithms.own.shaping`."""

    sort: ClassVar[str] = "advantage shaping"
    place: ClassVar[str] = "algorithm.advantage_shaping"


AdvantageShapingConfig = Annotated[
    WhitenAdvantageConfig | ClipAdvantageConfig,
    Field(discriminator="kind"),
    OrOwn(OwnAdvantageShapingConfig, "roll.extend.AdvantageShaping"),
]

ShapingConfig = RewardShapingConfig | MaskConfig | SampleWeightConfig | AdvantageShapingConfig
"""Entry of one of the four lists of shaping."""


class KlInRewardConfig(Config):
    """KL penalty in the reward: every token gets -coef * KL(policy || reference) on top of the
    reward (InstructGPT, arXiv 2203.02155). With a `target` the coefficient adapts after every step
    (Ziegler et al., arXiv 1909.08593): coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * samples /
    horizon.

    This is the controller in the code of the paper; the paper itself has 0.1 in place of samples /
    horizon. For rewards that a policy can exploit, such as those of a reward model.
    """

    coef: float = Field(default=0.001, gt=0)
    """Reward lost per nat of divergence. With a `target`: the coefficient of the first step."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the divergence, see the `kl` loss term. The policy gradient of k1 is that of the
    divergence."""
    target: float | None = Field(default=None, gt=0)
    """Divergence to hold, in nats per token: the mean over samples of the mean over their tokens
    (in the paper: per whole response). If left out: the coefficient stays as it is."""
    horizon: int = Field(default=HORIZON, ge=1)
    """Number of samples after which the coefficient has changed by about a fifth, if the divergence
    is off its target by a fifth or more."""

    @model_validator(mode="after")
    def _horizon_has_a_target(self) -> Self:
        """Refuse a `horizon` other than the default without a `target`."""
        if self.target is None and self.horizon != HORIZON:
            raise ValueError("`horizon` has no effect without `target`; set that or drop this")
        return self
