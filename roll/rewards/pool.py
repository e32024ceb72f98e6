"""The fault boundary of rewards: one reward over many samples, with bounds on everything.

Bounded concurrency, a time limit per sample, and a budget of failures per step. A flaky grader
costs one sample and shows up as `reward/<name>/error_rate`; a broken one stops the run with its
own traceback.

    pool.begin_step(expected_samples=512)          # at the start of a step
    scored = await pool.score(group)               # as groups arrive, from any number of tasks
    metrics = pool.take_metrics()                  # at its end
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from roll.config.reward import RewardConfig
from roll.core.errors import ConfigError, RewardError
from roll.core.metrics import Mean, Metric, Metrics
from roll.core.types import Sample
from roll.rewards.api import Reward, RewardContext
from roll.rewards.child import ChildRaisedError
from roll.rewards.loading import PREPARE, BoundReward, load_reward
from roll.rewards.runners import LoopRunner, ProcessRunner, Runner, ThreadRunner

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scored:
    """The verdict on one sample, and whether it is the reward's own."""

    reward: Reward
    """Of a failed sample: `on_error`, without parts."""
    failure: str | None = None
    """One line: why the reward has no verdict of its own."""
    timed_out: bool = False


@dataclass(slots=True)
class ErrorBudget:
    """Failures of one step against the share that is allowed.

    Samples arrive group by group, so the share is taken of the samples that the step expects, and
    not of those seen so far: the first failure of a big step is no verdict on the reward. A step
    that turns out bigger (replaced groups) allows more.
    """

    max_error_rate: float
    expected_samples: int
    seen: int = 0
    errors: int = 0
    timeouts: int = 0

    @property
    def exceeded(self) -> bool:
        allowed = self.max_error_rate * max(self.expected_samples, self.seen)
        # 0.1 * 30 is a little above 3 in binary; the tolerance only absorbs rounding.
        return self.errors + self.timeouts > allowed + 1e-9


class RewardPool:
    """Runs one reward. All methods belong to one event loop."""

    def __init__(self, name: str, config: RewardConfig, runner: Runner) -> None:
        self.name = name
        self._config = config
        self._runner = runner
        self._slots = asyncio.Semaphore(runner.width)
        self._budget: ErrorBudget | None = None
        self._first_failure: str | None = None
        self._totals: dict[str, Mean] = {}

    @classmethod
    def from_config(cls, name: str, config: RewardConfig, *, seed: int) -> RewardPool:
        """The pool of a reward function (`fn`), run where `in_process` says.

        Returns when the function is ready, which for `math` takes a few seconds.

        Raises:
            ConfigError: no such function, or it does not take `kwargs`.
        """
        if config.fn is None:
            raise ConfigError(f"rewards.{name}: has no `fn`; a worker class makes its own pool")
        ctx = RewardContext(name=name, seed=seed)
        # Also for child processes: a wrong name or argument must show before the first sample.
        bound = load_reward(config.fn, config.kwargs, ctx)
        if config.in_process:
            if config.fn in PREPARE:
                PREPARE[config.fn]()
            return cls.from_bound(name, config, bound)
        runner = ProcessRunner(
            config.fn,
            config.kwargs,
            ctx,
            concurrency=config.concurrency,
            timeout_s=config.timeout_s,
        )
        return cls(name, config, runner)

    @classmethod
    def from_bound(cls, name: str, config: RewardConfig, bound: BoundReward) -> RewardPool:
        """The pool of a function at hand, such as the `score` method of a worker."""
        width, timeout_s = config.concurrency, config.timeout_s
        if bound.is_async:
            return cls(name, config, LoopRunner(name, bound, width=width, timeout_s=timeout_s))
        return cls(name, config, ThreadRunner(name, bound, width=width, timeout_s=timeout_s))

    def begin_step(self, expected_samples: int) -> None:
        """Forget the failures of the last step.

        Args:
            expected_samples: how many samples this pool will see until the next `begin_step`;
                an estimate will do.
        """
        self._budget = ErrorBudget(self._config.max_error_rate, expected_samples)
        self._first_failure = None

    async def score(self, samples: Sequence[Sample]) -> list[Scored]:
        """A verdict per sample, in order.

        Raises:
            RewardError: the failures of this step are more than `max_error_rate` allows, or too
                many calls hang; carries the traceback of the first failure.
        """
        if self._budget is None:
            raise ValueError(f"reward {self.name!r}: call begin_step before score")
        tasks = [asyncio.ensure_future(self._one(sample)) for sample in samples]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            # When one raises, gather leaves the others running.
            for task in tasks:
                task.cancel()

    def take_metrics(self) -> Metrics:
        """`reward/<name>/{mean,error_rate,timeout_rate,<part>}` since the last call.

        `mean` is over all samples, with `on_error` for the failed ones: what training sees. Parts
        are over the samples that have them. Errors and timeouts are counted apart.
        """
        taken: dict[str, Metric] = {
            f"reward/{self.name}/{key}": total for key, total in self._totals.items()
        }
        self._totals = {}
        return Metrics(taken)

    async def host(
        self, make: Callable[[], Awaitable[None]], *, timeout_s: float | None = None
    ) -> None:
        """Await `make()` where an `async` reward runs, to open or close what that works with.

        Raises:
            TimeoutError: it took longer.
        """
        await self._runner.host(make, timeout_s)

    def close(self) -> None:
        """Let threads end and kill child processes."""
        self._runner.close()

    async def _one(self, sample: Sample) -> Scored:
        assert self._budget is not None
        budget = self._budget
        async with self._slots:
            try:
                scored = Scored(await self._runner.run(sample))
            except RewardError:
                raise
            except TimeoutError as error:
                text = f"TimeoutError: no result within timeout_s = {self._config.timeout_s:g}"
                text += f" ({error})" if str(error) else ""
                scored = self._failed(sample, text, text, timed_out=True)
            except Exception as error:  # noqa: BLE001 - the fault boundary of rewards
                line = _last_line(error)
                scored = self._failed(sample, line, _details(error), timed_out=False)
        self._count(budget, scored)
        return scored

    def _failed(self, sample: Sample, line: str, details: str, *, timed_out: bool) -> Scored:
        if self._first_failure is None:
            self._first_failure = f"sample {sample.id}:\n{details}"
            log.warning("reward %s failed on sample %s: %s", self.name, sample.id, line)
        return Scored(Reward(self._config.on_error), failure=line, timed_out=timed_out)

    def _count(self, budget: ErrorBudget, scored: Scored) -> None:
        timed_out, failed = scored.timed_out, scored.failure is not None
        budget.seen += 1
        budget.timeouts += timed_out
        budget.errors += failed and not timed_out
        self._add("mean", scored.reward.score)
        self._add("error_rate", float(failed and not timed_out))
        self._add("timeout_rate", float(timed_out))
        for part, value in scored.reward.parts.items():
            self._add(part, value)
        if budget.exceeded:
            raise RewardError(
                f"reward {self.name!r} failed on {budget.errors + budget.timeouts} of "
                f"the first {budget.seen} samples ({budget.errors} errors, {budget.timeouts} "
                f"timeouts), more than max_error_rate = {self._config.max_error_rate:g} of the "
                f"{max(budget.expected_samples, budget.seen)} to come allows; mend the reward, or "
                f"raise rewards.{self.name}.max_error_rate. First failure, {self._first_failure}"
            )

    def _add(self, key: str, value: float) -> None:
        fresh = Mean(value)
        self._totals[key] = self._totals[key].merge(fresh) if key in self._totals else fresh


def _details(error: Exception) -> str:
    """The traceback nearest to the fault; that of a child process as the child wrote it."""
    if isinstance(error, ChildRaisedError):
        return str(error).rstrip()
    return "".join(traceback.format_exception(error, limit=-4)).rstrip()


def _last_line(error: Exception) -> str:
    if isinstance(error, ChildRaisedError):
        return str(error).rstrip().splitlines()[-1]
    return f"{type(error).__name__}: {error}"
