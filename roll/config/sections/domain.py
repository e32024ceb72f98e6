"""Settings for the samples of one tag, where they differ from those of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from roll.config.algorithm.advantages import AdvantageConfig
from roll.config.algorithm.shaping import RewardShapingConfig
from roll.config.base import Config
from roll.config.sections.rollout import FilterConfig
from roll.config.sections.sampling import (
    NOT_TRAINED,
    RESHAPING,
    SamplingConfig,
    StopString,
    TokenId,
)


class DomainSampling(Config):
    """Sampling of one tag in training and, without `validation.sampling`, in validation. What is
    left out is as in `sampling`."""

    absent: ClassVar[Mapping[str, str]] = dict.fromkeys(RESHAPING, NOT_TRAINED)
    temperature: float | None = Field(default=None, gt=0)
    """Sampling temperature. The trainer computes log-probs of these samples at it."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Probability mass of the tokens to sample from."""
    top_k: int | None = Field(default=None, ge=-1)
    """Number of likeliest tokens to sample from; -1 means all."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest response, in tokens."""
    stop: tuple[StopString, ...] | None = None
    """Strings that end a response."""
    stop_in_text: bool | None = None
    """Leave the stop string that ended a response in the text that rewards and validation read."""
    stop_token_ids: tuple[TokenId, ...] | None = None
    """Tokens that end a response, by their ids."""
    ignore_eos: bool | None = None
    """Ignore the end-of-sequence token and always write `max_new_tokens` tokens."""

    def over(self, run: SamplingConfig) -> SamplingConfig:
        """Return the sampling of the run with these settings in place of its own."""
        return run.model_copy(update={key: value for key, value in self if value is not None})


class DomainConfig(Config):
    """Settings for the samples of one tag, in place of those of the run. What is left out is as in
    the run."""

    rewards: dict[str, float] = {}
    """Weights of rewards for this tag, by the names of the rewards. If left out: the `weight` of
    the reward."""
    reward_shaping: tuple[RewardShapingConfig, ...] | None = None
    """Changes to the total rewards of this tag, in place of `algorithm.reward_shaping`. A mean or
    standard deviation of the step is then one of the samples of this tag."""
    advantage: AdvantageConfig | None = None
    """Advantage estimator of this tag, in place of `algorithm.advantage`. A mean or standard
    deviation of the step is then one of the samples of this tag."""
    filters: tuple[FilterConfig, ...] | None = None
    """Filters of the groups of this tag, in place of `rollout.filters`."""
    sampling: DomainSampling = DomainSampling()
    """Sampling of this tag."""

    @property
    def apart(self) -> bool:
        """True if the advantages of this tag are computed apart from those of other tags."""
        return self.reward_shaping is not None or self.advantage is not None
