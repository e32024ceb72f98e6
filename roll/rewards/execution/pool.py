"""Execution of one reward on many samples, with limits on concurrency, time and failures.

The limits are the number of calls at once, the time per sample, and the failures per step. A reward
that fails now and then costs single samples and shows as `reward/<name>/error_rate`. A reward that
fails too often stops the run, and the error contains the reward's own traceback.

    pool.begin_step(expected_samples=512)          # at the start of a step
    scored = await pool.score(group)               # as groups arrive, from any number of tasks
    metrics = pool.take_metrics()                  # at its end
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from roll.config.sections.reward import RewardConfig
from roll.config.user_code.tracebacks import users_traceback
from roll.core.errors import ConfigError, RewardError
from roll.core.metrics import Metrics
from roll.core.threads.bounded import gives_up
from roll.core.threads.user_errors import described
from roll.core.types import Sample
from roll.rewards.api import Reward, RewardContext
from roll.rewards.built_in import PREPARE
from roll.rewards.execution.child import ChildRaisedError
from roll.rewards.execution.counters import (
    ErrorBudget,
    Purpose,
    RewardCounters,
    Scored,
    counters_of,
)
from roll.rewards.execution.runners import LoopRunner, ProcessRunner, Runner, ThreadRunner
from roll.rewards.loading import BoundReward, Work, load_reward
from roll.rewards.steps import Decode, placed

__all__ = ["ErrorBudget", "RewardPool", "Scored"]


class RewardPool:
    """Executor of one reward; all methods must be called on one event loop."""

    def __init__(self, name: str, config: RewardConfig, runner: Runner) -> None:
        """Make the pool of a reward that `runner` runs; `name` is its name in the config."""
        self._config = config
        self._runner = runner
        self._slots = asyncio.Semaphore(runner.width)
        self._counters = counters_of(name, config)
        self.decode: Decode | None = None
        """Function with which texts of responses are made; needed for steps in characters."""

    @classmethod
    def from_config(cls, name: str, config: RewardConfig, *, seed: int) -> RewardPool:
        """Create the pool of a reward function (`fn`), to run as `in_process` of the config says.

        Returns when the function is ready, which takes a few seconds for `math`.

        Raises:
            ConfigError: the function does not exist, or does not take `kwargs`.
            TimeoutError: the child process that `math` needs did not start.
        """
        if config.fn is None:
            raise ConfigError(f"rewards.{name}: has no `fn`; a worker class makes its own pool")
        ctx = RewardContext(name=name, seed=seed)
        # Load it here even if it runs in child processes: a wrong name or argument must fail now.
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
            timeout_s=config.limit_s,
            clock=config.clock,
        )
        return cls(name, config, runner)

    @classmethod
    def from_bound(cls, name: str, config: RewardConfig, bound: BoundReward) -> RewardPool:
        """Create the pool of a function that is loaded, such as the `score` method of a worker."""
        width, timeout_s = config.concurrency, config.limit_s
        if bound.is_async:
            return cls(name, config, LoopRunner(name, bound, width=width, timeout_s=timeout_s))
        return cls(name, config, ThreadRunner(name, bound, width=width, timeout_s=timeout_s))

    def begin_step(self, expected_samples: int, purpose: Purpose = Purpose.TRAINING) -> None:
        """Open a new budget of failures for the next step.

        Args:
            expected_samples: number of samples until the next `begin_step`; may be an estimate.
            purpose: purpose whose budget is opened; the budget of the other purpose stays.
        """
        self._counters[purpose].begin_step(expected_samples)

    async def score(
        self, samples: Sequence[Sample], purpose: Purpose = Purpose.TRAINING
    ) -> list[Scored]:
        """Score samples and return one result per sample, in order.

        Raises:
            RewardError: the step has more failures than `max_error_rate` allows (the message has
                the traceback of the first failure), too many calls hang, or an `async` reward
                blocks its event loop.
            ValueError: no step has begun.
        """
        return [scored for [scored] in await self._all(list(samples), purpose)]

    async def score_groups(
        self, groups: Sequence[Sequence[Sample]], purpose: Purpose = Purpose.TRAINING
    ) -> list[list[Scored]]:
        """Score groups with a reward that sees all samples of a group; return one result per
        sample.

        A failure on a group is a failure on each of its samples. Raises as `score` does.
        """
        return await self._all([list(group) for group in groups], purpose)

    async def _all(self, works: Sequence[Work], purpose: Purpose) -> list[list[Scored]]:
        """Score samples, or groups, at once; return the results of each."""
        counters = self._counters[purpose]
        budget = counters.opened()
        tasks = [asyncio.ensure_future(self._one(work, counters, budget)) for work in works]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            # When one raises, gather leaves the others running.
            for task in tasks:
                task.cancel()

    def take_metrics(self, purpose: Purpose = Purpose.TRAINING) -> Metrics:
        """Return the metrics since the last call; see `RewardCounters.take_metrics`."""
        return self._counters[purpose].take_metrics()

    async def host(
        self, make: Callable[[], Awaitable[None]], *, timeout_s: float | None = None
    ) -> None:
        """Await `make()` on the event loop of an `async` reward, to open or close its resources.

        For a reward that is not `async`, `make()` runs on the event loop of the caller.

        Raises:
            TimeoutError: the awaitable took longer than `timeout_s`.
        """
        await self._runner.host(make, timeout_s)

    def close(self) -> None:
        """Let idle threads end, and kill child processes."""
        self._runner.close()

    async def _one(self, work: Work, counters: RewardCounters, budget: ErrorBudget) -> list[Scored]:
        """Score a sample or group when a slot is free; an exception or timeout becomes a counted
        failure of each sample, only RewardError passes."""
        samples = [work] if isinstance(work, Sample) else work
        clock = asyncio.get_running_loop().time
        arrived_s = clock()
        try:
            async with asyncio.timeout(self._config.queue_timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            text = "TimeoutError: no place free within queue_timeout_s = "
            text += f"{self._config.queue_timeout_s:g}"
            scored = [counters.failed(s, budget, text, text, timed_out=True) for s in samples]
            counters.took(clock() - arrived_s, 0.0, len(samples))
            return _counted(scored, counters, budget)
        begun_s = clock()
        try:
            scored = await self._run(work, samples, counters, budget)
        finally:
            self._slots.release()
        counters.took(begun_s - arrived_s, clock() - begun_s, len(samples))
        return _counted(scored, counters, budget)

    async def _run(
        self, work: Work, samples: Sequence[Sample], counters: RewardCounters, budget: ErrorBudget
    ) -> list[Scored]:
        """Return the result of each sample of the work; see `_one`."""
        try:
            rewards = await self._runner.run(work)
            given = [rewards] if isinstance(work, Sample) else rewards
            pairs = zip(samples, given, strict=True)
            scored = [await self._placed(sample, reward) for sample, reward in pairs]
        except RewardError:
            raise
        except TimeoutError as error:
            text = f"TimeoutError: no result within timeout_s = {self._config.limit_s:g}"
            text += f" ({error})" if str(error) else ""
            scored = [counters.failed(s, budget, text, text, timed_out=True) for s in samples]
        # The fault boundary of rewards.
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and gives_up():
                raise
            line, details = _last_line(error), _details(error)
            scored = [counters.failed(s, budget, line, details) for s in samples]
        return scored

    async def _placed(self, sample: Sample, reward: Reward) -> Scored:
        """Return the result of a sample, with the rewards of its steps at their tokens; ValueError
        if the config expects none, or they have no place."""
        if not reward.steps and reward.token_rewards is None:
            return Scored(reward)
        if not self._config.process:
            raise ValueError(
                "returned rewards of steps; set `process: true` for this reward, so that the run "
                "computes advantages of single tokens"
            )
        steps = await asyncio.to_thread(placed, reward, sample, self.decode)
        return Scored(Reward(reward.score, reward.parts), steps=steps)


def _counted(scored: list[Scored], counters: RewardCounters, budget: ErrorBudget) -> list[Scored]:
    """Count results in the budget, and return them; RewardError if it is exceeded."""
    for each in scored:
        counters.count(each, budget)
    return scored


def _details(error: BaseException) -> str:
    """Return the traceback from the first frame of user code on; a child's traceback unchanged."""
    if isinstance(error, ChildRaisedError):
        return str(error).rstrip()
    return users_traceback(error)


def _last_line(error: BaseException) -> str:
    """Return an error as one line: its class and message, or the last line of a child's
    traceback."""
    if isinstance(error, ChildRaisedError):
        return str(error).rstrip().splitlines()[-1]
    return described(error).splitlines()[0]
