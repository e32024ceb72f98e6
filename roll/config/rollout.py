"""How a step's samples are collected."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from roll.config.base import Config


class EqualRewardsConfig(Config):
    """Groups whose samples all got the same reward are replaced: they teach nothing (dynamic
    sampling of DAPO, arXiv 2503.14476)."""

    kind: Literal["equal_rewards"] = "equal_rewards"


class MeanRewardConfig(Config):
    """Groups are replaced unless low < mean reward < high (online difficulty filtering, arXiv
    2504.03380)."""

    kind: Literal["mean_reward"] = "mean_reward"
    low: float = 0.0
    """A group with this mean reward, or less, is too hard."""
    high: float = 1.0
    """A group with this mean reward, or more, is too easy."""

    @model_validator(mode="after")
    def _bounds_leave_something(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low:g} must lie below high = {self.high:g}")
        return self


class CustomFilterConfig(Config):
    """Groups are replaced where a function of your own says so: `fn(group, **kwargs)` takes a
    `roll.rollout.types.Group` and returns why it is rejected (a text) or None; or True to keep it
    and False to reject it."""

    kind: Literal["custom"] = "custom"
    fn: str
    """`package.module:function`."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments for the function."""


FilterConfig = Annotated[
    EqualRewardsConfig | MeanRewardConfig | CustomFilterConfig, Field(discriminator="kind")
]


class RolloutConfig(Config):
    filters: tuple[FilterConfig, ...] = ()
    """Dynamic sampling: a group is rejected by the first filter that objects, and replaced by that
    of another prompt. In order, so put the cheap ones first."""
    extra_prompts: int = Field(default=0, ge=0)
    """Prompts in flight beyond what the step still needs; leftovers are aborted."""
    max_prompts_factor: float = Field(default=4.0, ge=1)
    """A step that has tried this many times its prompts without filling up stops the run."""
    max_in_flight_groups: int = Field(default=256, ge=1)
    """Prompts generated at once over all replicas."""
    request_timeout_s: float = Field(default=600, gt=0)
    """For one prompt's samples."""
