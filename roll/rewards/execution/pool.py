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
from collections.abc import Awaitable, Callable, Sequence

from roll.config.sections.reward import RewardConfig
from roll.core.errors import ConfigError, RewardError
from roll.core.metrics import Metrics
from roll.core.types import Sample
from roll.rewards.api import RewardContext
from roll.rewards.execution.child import ChildRaisedError
from roll.rewards.execution.counters import (
    ErrorBudget,
    Purpose,
    RewardCounters,
    Scored,
    counters_of,
)
from roll.rewards.execution.runners import LoopRunner, ProcessRunner, Runner, ThreadRunner
from roll.rewards.execution.tracebacks import users_traceback
from roll.rewards.loading import PREPARE, BoundReward, load_reward

__all__ = ["ErrorBudget", "RewardPool", "Scored"]


class RewardPool:
    """Runs one reward. All methods belong to one event loop."""

    def __init__(self, name: str, config: RewardConfig, runner: Runner) -> None:
        self.name = name
        self._config = config
        self._runner = runner
        self._slots = asyncio.Semaphore(runner.width)
        self._counters = counters_of(name, config)

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

    def begin_step(self, expected_samples: int, purpose: Purpose = Purpose.TRAINING) -> None:
        """Forget the failures of the last step.

        Args:
            expected_samples: how many samples this pool will see until the next `begin_step`;
                an estimate will do.
            purpose: whose budget begins anew; the other's goes on.
        """
        self._counters[purpose].begin_step(expected_samples)

    async def score(
        self, samples: Sequence[Sample], purpose: Purpose = Purpose.TRAINING
    ) -> list[Scored]:
        """A verdict per sample, in order.

        Raises:
            RewardError: the failures of this step are more than `max_error_rate` allows, or too
                many calls hang; carries the traceback of the first failure.
        """
        counters = self._counters[purpose]
        budget = counters.opened()
        tasks = [asyncio.ensure_future(self._one(sample, counters, budget)) for sample in samples]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            # When one raises, gather leaves the others running.
            for task in tasks:
                task.cancel()

    def take_metrics(self, purpose: Purpose = Purpose.TRAINING) -> Metrics:
        """See `RewardCounters.take_metrics`."""
        return self._counters[purpose].take_metrics()

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

    async def _one(self, sample: Sample, counters: RewardCounters, budget: ErrorBudget) -> Scored:
        async with self._slots:
            try:
                scored = Scored(await self._runner.run(sample))
            except RewardError:
                raise
            except TimeoutError as error:
                text = f"TimeoutError: no result within timeout_s = {self._config.timeout_s:g}"
                text += f" ({error})" if str(error) else ""
                scored = counters.failed(sample, budget, text, text, timed_out=True)
            except Exception as error:  # noqa: BLE001 - the fault boundary of rewards
                scored = counters.failed(sample, budget, _last_line(error), _details(error))
        counters.count(scored, budget)
        return scored


def _details(error: Exception) -> str:
    """The traceback from the user's first frame on; that of a child process as it wrote it."""
    if isinstance(error, ChildRaisedError):
        return str(error).rstrip()
    return users_traceback(error)


def _last_line(error: Exception) -> str:
    if isinstance(error, ChildRaisedError):
        return str(error).rstrip().splitlines()[-1]
    return f"{type(error).__name__}: {error}"
