"""Settings of rewards: built in or by import path, selected by tag."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from roll.config.base import Config
from roll.config.sections.model import ModelConfig


class RewardConfig(Config):
    """Reward, computed by a function (`fn`), a `RewardWorker` subclass (`worker`) or a reward model
    (`model`)."""

    fn: str | None = None
    """Name of a built-in reward such as `math`, or `package.module:function`."""
    worker: str | None = None
    """Import path `package.module:Class` of a RewardWorker subclass, whose `setup` runs once."""
    model: ModelConfig | None = None
    """Sequence classifier with one label and the policy's tokenizer, as `pipeline: reward_model`
    trains it. One worker runs on each device of `pool`."""
    max_tokens_per_microbatch: int = Field(default=16384, ge=1)
    """Number of tokens, padding included, in one forward pass; only for `model`."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments for the function or the class."""
    per: Literal["sample", "group"] = "sample"
    """What the function gets: `sample`: one sample; `group`: the list of all samples of a prompt,
    once they are finished, to return the list of their rewards. `group` is only for `fn`."""
    tags: tuple[str, ...] = Field(default=("default",), min_length=1)
    """Tags of the samples that this reward scores. If several rewards score a tag, their weighted
    scores are added."""
    weight: float = 1.0
    """Factor of this reward in the total reward."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Time limit for one sample, or for one group with `per: group`, in seconds. A sample that
    takes longer counts as failed."""
    concurrency: int = Field(default=64, ge=1)
    """Number of samples, or groups, that one worker scores at once."""
    in_process: bool = True
    """Run the function in the worker's own process. False runs the function in child processes that
    can be killed: for heavy or untrusted code. Only for `fn`: a `worker` keeps its state in its own
    process."""
    workers: int = Field(default=1, ge=1)
    """Number of reward workers."""
    pool: str | None = None
    """Pool on whose devices the workers are placed in turn. If left out: the pool of
    actor_infer."""
    max_error_rate: float = Field(default=0.1, ge=0, le=1)
    """Largest share of failed samples (exception, timeout, NaN) among the samples that this reward
    scores in a step. A larger share stops the run."""
    on_error: float | None = None
    """Score of a failed sample. If left out: a failed sample has no score; it is counted, but not
    trained on and not compared with the other samples of its prompt."""

    @property
    def what(self) -> str:
        """Function, class or model path that computes the reward, for messages."""
        return self.fn or self.worker or (self.model.path if self.model else "")

    @model_validator(mode="after")
    def _one_of_three(self) -> Self:
        """Require exactly one of `fn`, `worker` and `model`, and refuse settings that do not
        concern it."""
        if sum(each is not None for each in (self.fn, self.worker, self.model)) != 1:
            raise ValueError(
                "set exactly one of `fn` (a function), `worker` (a class) and `model` (a reward "
                "model)"
            )
        if self.per == "group" and ":" not in (self.fn or ""):
            raise ValueError(
                "`per: group` works for a function of your own (`fn: my_module:fn`) only; built-in "
                "rewards, `worker` and `model` score samples one by one. Drop `per`"
            )
        if self.model is not None and (self.kwargs or not self.in_process or self.workers != 1):
            raise ValueError(
                "`kwargs`, `in_process` and `workers` concern functions and classes; a `model` has "
                "a worker on each device of its `pool`. Drop them"
            )
        if self.model is not None:
            self._refuse_limits_of_functions()
        if self.worker is not None and not self.in_process:
            raise ValueError(
                "`in_process: false` works for a function (`fn`) only; a `worker` runs in its own "
                "process and can start killable children itself. Drop `in_process`"
            )
        return self

    def _refuse_limits_of_functions(self) -> None:
        """Raise ValueError if a reward model is given a `timeout_s` or `concurrency` other than the
        default."""
        for key in ("timeout_s", "concurrency"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f"`{key}` concerns functions and classes; a `model` scores what has come in "
                    "as few passes as `max_tokens_per_microbatch` allows, and nothing can cut them "
                    f"short. Drop `{key}`"
                )
