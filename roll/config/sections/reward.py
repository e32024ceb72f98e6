"""Settings of rewards: built in or by import path, selected by tag."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from roll.config.base import Config
from roll.config.sections.model import ModelConfig
from roll.config.sections.placement import Variables
from roll.config.sections.services.judge import GROUP_VERDICTS, JudgedConfig
from roll.config.sections.services.remote import RemoteConfig

_WITH_QUEUES = frozenset({"code"})
"""Built-in rewards whose work waits in a queue and has limits of its own."""
_USUAL_S, _WAITING_S = 10.0, 3600.0


class RewardConfig(Config):
    """Reward, computed by a function (`fn`), a `RewardWorker` subclass (`worker`), a reward model
    (`model`), a model that judges (`judge`) or a server of the user (`remote`)."""

    fn: str | None = None
    """Name of a built-in reward such as `math`, or `package.module:function`."""
    worker: str | None = None
    """Import path `package.module:Class` of a RewardWorker subclass, whose `setup` runs once."""
    model: ModelConfig | None = None
    """Sequence classifier with one label and the policy's tokenizer, as `pipeline: reward_model`
    trains it. One worker runs on each device of `pool`."""
    judge: JudgedConfig | None = None
    """What one of the `judges` is asked about each sample, or about each group (`per: group`)."""
    remote: RemoteConfig | None = None
    """Server that computes this reward for batches of samples, or of groups (`per: group`)."""
    max_tokens_per_microbatch: int = Field(default=16384, ge=1)
    """Number of tokens, padding included, in one forward pass; only for `model`."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments for the function or the class. The server of a `remote` gets them with each
    call."""
    per: Literal["sample", "group"] = "sample"
    """What the function gets: `sample`: one sample; `group`: the list of all samples of a prompt,
    once they are finished, to return the list of their rewards. `group` is only for `fn`, `remote`
    and verdicts of a `judge` that compare."""
    process: bool = False
    """The function or class may also reward single steps or tokens (`steps` or `token_rewards` of
    its `Reward`). The run then computes advantages of single tokens, for which the driver has all
    tokens."""
    tags: tuple[str, ...] = Field(default=("default",), min_length=1)
    """Tags of the samples that this reward scores. If several rewards score a tag, their weighted
    scores are added."""
    weight: float = 1.0
    """Factor of this reward in the total reward."""
    env: Variables = {}
    """Environment variables of the reward's workers alone. `config.yaml` holds them: no place for
    secrets, which belong into the environment of the run."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Time limit for one sample, or for one group with `per: group`, in seconds. A sample that
    takes longer counts as failed. If left out: 10 s; for `code`, whose programs wait in a queue and
    have limits of their own, an hour."""
    clock: Literal["wall", "cpu"] = "wall"
    """Clock of `timeout_s` with `in_process: false`. `cpu`: seconds that the function computes, so
    that a busy machine fails nobody; a call that gets less than a tenth of a core for that long
    fails too."""
    queue_timeout_s: float | None = Field(default=None, gt=0)
    """Longest wait of a sample, or group, for one of the `concurrency` places, in seconds. One that
    waits longer counts as failed, so that a step waits for this reward no longer than
    `queue_timeout_s` + `timeout_s` after its last response. null: no limit."""
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
    def limit_s(self) -> float:
        """Time limit for one sample or group, in seconds, whether it was set or not."""
        if self.timeout_s is not None:
            return self.timeout_s
        return _WAITING_S if self.fn in _WITH_QUEUES else _USUAL_S

    @property
    def what(self) -> str:
        """Function, class, model path, judge or server that computes the reward, for
        messages."""
        named = self.fn or self.worker or (self.model.path if self.model else "")
        if self.judge is not None:
            return f"judge {self.judge.by}"
        return named or (self.remote.url if self.remote else "")

    @model_validator(mode="after")
    def _one_of_all(self) -> Self:
        """Require exactly one of `fn`, `worker`, `model`, `judge` and `remote`, and refuse settings
        that do not concern it."""
        kinds = (self.fn, self.worker, self.model, self.judge, self.remote)
        if sum(each is not None for each in kinds) != 1:
            raise ValueError(
                "set exactly one of `fn` (a function), `worker` (a class), `model` (a reward "
                "model), `judge` (a model that is asked) and `remote` (a server)"
            )
        self._check_per()
        if self.process and self.worker is None and ":" not in (self.fn or ""):
            raise ValueError(
                "`process: true` works for functions and classes of your own; built-in rewards, "
                "`model`, `judge` and `remote` score whole responses. Drop `process`"
            )
        if self.model is not None and (self.kwargs or not self.in_process or self.workers != 1):
            raise ValueError(
                "`kwargs`, `in_process` and `workers` concern functions and classes; a `model` has "
                "a worker on each device of its `pool`. Drop them"
            )
        if self.model is not None:
            self._refuse_limits_of_functions(
                "a `model` scores what has come in as few passes as `max_tokens_per_microbatch` "
                "allows, and nothing can cut them short"
            )
        if self.judge is not None:
            if self.kwargs or not self.in_process:
                raise ValueError(
                    "`kwargs` and `in_process` concern functions; `judge` has settings of its own. "
                    "Drop them"
                )
            self._refuse_limits_of_functions("the limits of a judge are in `judges`")
        if self.remote is not None:
            if not self.in_process:
                raise ValueError(
                    "`in_process` concerns functions; `remote` runs on a server. Drop `in_process`"
                )
            self._refuse_limits_of_functions("those of a server are `remote.timeout_s` and so on")
            if self.remote.concurrency < self.workers:
                raise ValueError(
                    f"`workers`: {self.workers} workers cannot share remote.concurrency = "
                    f"{self.remote.concurrency}; use fewer"
                )
        if self.model is None and self.changed("max_tokens_per_microbatch"):
            raise ValueError(
                "`max_tokens_per_microbatch` concerns the passes of a `model`; drop it"
            )
        if self.clock == "cpu" and self.in_process:
            raise ValueError(
                "`clock: cpu` measures a child process; set `in_process: false`, or drop `clock`"
            )
        if self.worker is not None and not self.in_process:
            raise ValueError(
                "`in_process: false` works for a function (`fn`) only; a `worker` runs in its own "
                "process and can start killable children itself. Drop `in_process`"
            )
        return self

    def _check_per(self) -> None:
        """Raise ValueError if the reward does not score what `per` says."""
        if self.judge is not None:
            compares = self.judge.verdict.kind in GROUP_VERDICTS
            if compares != (self.per == "group"):
                raise ValueError(
                    f"`per`: a verdict of kind {self.judge.verdict.kind!r} is one on "
                    + (
                        "all samples of a prompt; set `per: group`"
                        if compares
                        else "a single sample; drop `per`, or choose one of "
                        f"{', '.join(GROUP_VERDICTS)}"
                    )
                )
        elif self.per == "group" and self.remote is None and ":" not in (self.fn or ""):
            raise ValueError(
                "`per: group` works for a function of your own (`fn: my_module:fn`), a `judge` and "
                "a `remote` only; built-in rewards, `worker` and `model` score samples one by one. "
                "Drop `per`"
            )

    def _refuse_limits_of_functions(self, why: str) -> None:
        """Raise ValueError if a reward that has no such limits is given a `timeout_s`,
        `queue_timeout_s` or `concurrency` other than the default; `why` is a part of the
        message."""
        for key in self.changed("timeout_s", "queue_timeout_s", "concurrency"):
            raise ValueError(f"`{key}` concerns functions and classes; {why}. Drop `{key}`")
