"""Rewards: built in or by import path, routed by tag."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from roll.config.base import Config


class RewardConfig(Config):
    """One reward: a function (`fn`) or a `RewardWorker` subclass (`worker`)."""

    fn: str | None = None
    """Built-in name such as `math`, or `package.module:function`."""
    worker: str | None = None
    """`package.module:Class`, a RewardWorker that sets itself up once."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments for the function or the class."""
    tags: tuple[str, ...] = Field(default=("default",), min_length=1)
    """Samples with these tags are scored; several rewards of one tag add up by weight."""
    weight: float = 1.0
    """Factor of this reward in the total."""
    timeout_s: float = Field(default=10.0, gt=0)
    """For one sample; a sample that takes longer counts as failed."""
    concurrency: int = Field(default=64, ge=1)
    """Samples scored at once by one worker."""
    in_process: bool = True
    """False runs the function in child processes: for heavy or hostile work that must be killable.
    Only for `fn`: a `worker` holds what it owns in its own process."""
    workers: int = Field(default=1, ge=1)
    """Number of reward workers."""
    pool: str | None = None
    """Pool on whose devices the workers live, in turn; left out: that of actor_infer."""
    max_error_rate: float = Field(default=0.1, ge=0, le=1)
    """Failures (exception, timeout, NaN) above this share of the samples that the reward scores
    in a step stop the run."""
    on_error: float = 0.0
    """Score of a failed sample."""

    @model_validator(mode="after")
    def _one_of_fn_and_worker(self) -> RewardConfig:
        if (self.fn is None) == (self.worker is None):
            raise ValueError("set exactly one of `fn` (a function) and `worker` (a class)")
        if self.worker is not None and not self.in_process:
            raise ValueError(
                "`in_process: false` works for a function (`fn`) only; a `worker` runs in its own "
                "process and can start killable children itself. Drop `in_process`"
            )
        return self
