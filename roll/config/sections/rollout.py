"""Settings of generation: the way in which the samples of a step are collected."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from roll.config.base import Config
from roll.config.user_code.own import OrOwn, OwnPart


class EqualRewardsConfig(Config):
    """Filter that rejects groups whose samples all got the same reward, because such groups teach
    nothing (dynamic sampling of DAPO, arXiv 2503.14476)."""

    kind: Literal["equal_rewards"] = "equal_rewards"


class MeanRewardConfig(Config):
    """Filter that keeps only groups with low < mean reward < high (online difficulty filtering,
    arXiv 2504.03380)."""

    kind: Literal["mean_reward"] = "mean_reward"
    low: float = 0.0
    """Mean reward up to which a group is too hard."""
    high: float = 1.0
    """Mean reward from which on a group is too easy."""

    @model_validator(mode="after")
    def _bounds_leave_something(self) -> Self:
        """Require low < high."""
        if self.low >= self.high:
            raise ValueError(f"low = {self.low:g} must lie below high = {self.high:g}")
        return self


class CustomFilterConfig(Config):
    """Filter by a function of your own. `fn(group, **kwargs)` takes a `roll.rollout.types.Group`
    and returns None to keep the group or the reason (a text) to reject it; or True to keep it and
    False to reject it."""

    kind: Literal["custom"] = "custom"
    fn: str
    """Import path of the function, `package.module:function`."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments for the function."""


class DropConfig(Config):
    """Rule that leaves a sample out by what its rewards or its environment say of it: for
    trajectories in a wrong format, or that found a way around the task."""

    part: str
    """Name `<reward>/<part>` or `<environment>/<number of info>` as in the metrics, or the name of
    a reward, which means its score. A sample without it is kept."""
    above: float | None = None
    """Value above which the sample is left out."""
    below: float | None = None
    """Value below which the sample is left out."""

    @model_validator(mode="after")
    def _has_a_bound(self) -> Self:
        """Require at least one bound."""
        if self.above is None and self.below is None:
            raise ValueError("leaves nothing out without a bound; set `above`, `below` or both")
        return self


class OwnFilterConfig(OwnPart):
    """Base of the filters that users bring as classes; see `roll.rollout.own`."""

    sort: ClassVar[str] = "filter"
    place: ClassVar[str] = "rollout.filters"


FilterConfig = Annotated[
    EqualRewardsConfig | MeanRewardConfig | CustomFilterConfig,
    Field(discriminator="kind"),
    OrOwn(OwnFilterConfig, "roll.extend.Filter"),
]


class OwnLoopConfig(OwnPart):
    """Base of the rollout loops that users bring; see `roll.rollout.own`."""

    sort: ClassVar[str] = "rollout loop"
    place: ClassVar[str] = "rollout.loop"


class HealthConfig(Config):
    """Rules for replacing an inference replica that is dead or slow. Its requests continue on other
    replicas from the tokens known so far, and a new engine with the current weights takes its
    place."""

    heartbeat_s: float = Field(default=1.0, gt=0)
    """Time between two heartbeats of a replica, in seconds. A heartbeat carries the tokens written
    since the last one."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Time after which an unanswered heartbeat makes the replica count as lost, in seconds. A
    replica that answers only with errors for this long is lost as well. For its first heartbeat a
    new engine has twice the time of the engine that it replaces."""
    slow_factor: float = Field(default=0.1, ge=0, lt=1)
    """Share of the replicas' median rates below which a replica counts as slow. A replica is
    replaced if it is slow for five heartbeats in a row; or for thirty after new weights, after its
    devices were lent, or after requests came from another replica. Rates count written tokens and
    read tokens: those of prompts, and after new weights those of all contexts again. 0: never."""
    restart_timeout_s: float = Field(default=900.0, gt=0)
    """Time limit for a new engine to start, in seconds. The engine then waits until the current
    training step ends, to receive the weights."""
    max_restarts: int = Field(default=3, ge=0)
    """Number of times that one replica is restarted in a run. After that, the run continues without
    the replica. After a restart that failed, the next one waits for the time of ten heartbeats,
    and twice as long after each further one."""


class RolloutConfig(Config):
    """Generation of the samples of a step, and limits of the engines that generate."""

    replay: str | None = None
    """The output_dir of `roll rollout`, or of a run with `track.samples: all`, whose samples the
    steps train on, in place of generated ones. null: generate. See docs/replay.md."""
    loop: Annotated[OwnLoopConfig, OrOwn(OwnLoopConfig, "roll.extend.RolloutLoop")] | None = None
    """Class of yours that makes the responses to a prompt, `{kind: my_module:MyLoop}`. null: a
    response is what the engine writes after the prompt."""
    filters: tuple[FilterConfig, ...] = ()
    """Filters of groups (dynamic sampling). The first filter that objects rejects a group, and a
    group of another prompt of the same source replaces it. Filters run in this order, so put cheap
    ones first."""
    drop: tuple[DropConfig, ...] = ()
    """Rules that leave out single samples of training, before the filters see their group. Such a
    sample is neither trained on nor compared with the others, as if a reward had failed;
    `samples/dropped` counts."""
    max_staleness: int = Field(default=0, ge=0)
    """Number of steps that generation may be ahead of training. 0: the samples of a step are
    generated, then trained on. k: while a step trains, samples of the next k steps are generated;
    no sample is trained on that is more than k weight versions old. Use an `algorithm.correction`
    above 0."""
    in_flight: Literal["continue", "restart"] = "continue"
    """Treatment of unfinished samples when new weights arrive. `continue`: the sample goes on, and
    each token keeps the weight version and the log-prob that it was written with. `restart`: the
    sample is generated again from the beginning; refused where it is made of several requests, in
    pipeline: agentic and with `loop`."""
    extra_prompts: int = Field(default=0, ge=0)
    """Number of prompts in flight beyond the number needed. The groups that finish first are used;
    those that would become too old are aborted and tried again later. This favours short
    responses."""
    siblings: Literal["together", "separate"] = "together"
    """Form of the requests for the samples of a prompt. `together`: one request for all of them.
    `separate`: one request per sample; samples are rewarded one by one, and can go to several
    replicas. Episodes are always played separately, and refuse it."""
    redundant_samples: int = Field(default=0, ge=0)
    """Number of samples per prompt beyond data.samples_per_prompt. The first samples that finish
    form the group, and the others are aborted. Needs `siblings: separate`, except for episodes.
    This favours short responses."""
    routing: Literal["sticky", "least_loaded"] = "sticky"
    """Choice of the replica for a request. `sticky`: all requests of a prompt go to the replica
    that has cached its prefix, while there is room. `least_loaded`: each request goes to the
    replica with the fewest outstanding tokens."""
    queue_per_replica: int = Field(default=0, ge=0)
    """Number of sequences sent to a replica beyond those that it decodes at once."""
    max_prompts_factor: float = Field(default=4.0, ge=1)
    """Number of tried prompts, as a multiple of the prompts of a step, after which a step that is
    still incomplete stops the run."""
    max_in_flight_groups: int = Field(default=1024, ge=1)
    """Largest number of prompts in flight at once, over all replicas."""
    request_timeout_s: float = Field(default=600, gt=0)
    """Time without any progress of the replica that has a request, after which the request fails,
    in seconds. Progress is a token written, a token read, or a request ended. A request that makes
    progress may take any time."""
    health: HealthConfig = HealthConfig()
