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


class HealthConfig(Config):
    """When an inference replica is given up. Its requests go on elsewhere with the tokens that are
    known of them, and a new engine with the present weights takes its place."""

    heartbeat_s: float = Field(default=1.0, gt=0)
    """Seconds between two heartbeats of a replica, each with the tokens written since the last."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds after which a heartbeat is given up, and the replica with it; so is a replica that
    has answered with nothing but errors for as long."""
    slow_factor: float = Field(default=0.1, ge=0, lt=1)
    """A replica is given up when it works at less than this share of the replicas' median rates,
    five heartbeats in a row, or thirty after new weights, a return or a request from elsewhere; 0:
    never. Work is writing, and reading: of prompts, and after new weights of all contexts again."""
    restart_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds for a new engine. It then waits for the weights, until a training step is over."""
    max_restarts: int = Field(default=3, ge=0)
    """Of one replica in a run; afterwards the run goes on without it."""


class RolloutConfig(Config):
    filters: tuple[FilterConfig, ...] = ()
    """Dynamic sampling: a group is rejected by the first filter that objects, and replaced by that
    of another prompt of the same source. In order, so put the cheap ones first."""
    max_staleness: int = Field(default=0, ge=0)
    """Steps that samples may be ahead of training. 0: a step's samples are generated, then trained
    on. k: while a step trains, samples of the next k are generated; none is trained on that
    is more than k weight versions old. Wants an `algorithm.correction`."""
    in_flight: Literal["continue", "restart"] = "continue"
    """What becomes of unfinished samples at new weights: each token keeps the version and the
    log-prob it was written with, or the sample starts again."""
    extra_prompts: int = Field(default=0, ge=0)
    """Prompts in flight beyond what is needed; the fastest win, and those that would be too old
    are aborted and tried again later. Favours short responses."""
    siblings: Literal["together", "separate"] = "together"
    """The samples of a prompt as one request, or as one request each: these are rewarded one by
    one, and may go to several replicas."""
    redundant_samples: int = Field(default=0, ge=0)
    """Samples per prompt beyond data.samples_per_prompt; the first that end make the group, the
    others are aborted. Needs `siblings: separate`. Favours short responses."""
    routing: Literal["sticky", "least_loaded"] = "sticky"
    """A prompt's requests stay on one replica, where its prefix is cached, while there is room; or
    each goes to the replica with the fewest outstanding tokens."""
    queue_per_replica: int = Field(default=0, ge=0)
    """Sequences sent to a replica beyond those that it decodes at once."""
    max_prompts_factor: float = Field(default=4.0, ge=1)
    """A step that has tried this many times its prompts without filling up stops the run."""
    max_in_flight_groups: int = Field(default=1024, ge=1)
    """Prompts in flight at once over all replicas."""
    request_timeout_s: float = Field(default=600, gt=0)
    """Seconds without any progress of the replica that has a request: no token written, none read,
    no request ended. A request whose tokens come may take as long as it will."""
    health: HealthConfig = HealthConfig()
