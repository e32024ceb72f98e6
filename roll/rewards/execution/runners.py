"""Three places where a reward function can run: an event loop, a thread, a child process.

All have the same face: `run(sample)` within a time limit, at most `width` at once. They raise what
the function raises, or TimeoutError; the pool counts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from roll.core.errors import RewardError
from roll.core.loop_thread import LoopThread
from roll.core.types import Sample
from roll.rewards.api import Reward, RewardContext
from roll.rewards.execution.bounded import BlockedLoopError, run_bounded
from roll.rewards.execution.child import ChildSpec
from roll.rewards.execution.child_pool import ChildPool
from roll.rewards.execution.threads import DaemonThreads, TooManyHungError
from roll.rewards.loading import BoundReward, load_reward, normalise

MAX_HUNG_THREADS = 8
"""A run goes on with this many threads that never return, and stops at the next."""
CLOSE_TIMEOUT_S = 0.2
"""For the loop of an `async` reward, whose closing stands in the way of the worker's own loop."""


class Runner(Protocol):
    """Runs one reward function; see the module docstring."""

    @property
    def width(self) -> int: ...

    async def run(self, sample: Sample) -> Reward: ...

    async def host(self, make: Callable[[], Awaitable[None]], timeout_s: float | None) -> None:
        """Await `make()` on the loop of the function, if it has one: clients that are opened there
        belong to that loop."""
        ...

    def close(self) -> None: ...


class LoopRunner:
    """An `async` function, on an event loop of its own. It must await, never block.

    All samples share the loop, so a single call that blocks it for good stops the run.
    """

    def __init__(self, name: str, bound: BoundReward, *, width: int, timeout_s: float) -> None:
        self._name = name
        self._bound = bound
        self.width = width
        self._timeout_s = timeout_s
        self._loop = LoopThread(f"reward-{name}", cancel_timeout_s=CLOSE_TIMEOUT_S)

    async def run(self, sample: Sample) -> Reward:
        """See `Runner`.

        Raises:
            RewardError: a call blocks the loop, and no time limit can reach it; the run must stop.
        """
        try:
            return normalise(
                await run_bounded(self._loop, lambda: self._bound.call(sample), self._timeout_s)
            )
        except BlockedLoopError as error:
            raise RewardError(
                f"reward {self._name!r} is `async` but blocks: sample {sample.id} ran out of its "
                f"{self._timeout_s:g} s, and {error}. Await what takes time, wrap a blocking call "
                "in `asyncio.to_thread`, or make the function a plain `def`; what may hang for "
                f"good needs rewards.{self._name}.in_process: false (child processes that can be "
                "killed)"
            ) from None

    async def host(self, make: Callable[[], Awaitable[None]], timeout_s: float | None) -> None:
        await run_bounded(self._loop, make, timeout_s)

    def close(self) -> None:
        self._loop.close()


class ThreadRunner:
    """A plain function, in threads of this process."""

    def __init__(self, name: str, bound: BoundReward, *, width: int, timeout_s: float) -> None:
        self._name = name
        self._bound = bound
        self.width = width
        self._timeout_s = timeout_s
        self._threads = DaemonThreads(f"reward-{name}", max_hung=MAX_HUNG_THREADS)

    async def run(self, sample: Sample) -> Reward:
        """See `Runner`.

        Raises:
            RewardError: too many calls never returned; the run must stop.
        """
        try:
            value = await self._threads.run(lambda: self._bound.call(sample), self._timeout_s)
        except TooManyHungError as error:
            raise RewardError(
                f"reward {self._name!r}: {error} within {self._timeout_s:g} s and hold a thread "
                f"each, which nothing can kill; set rewards.{self._name}.in_process: false to run "
                "it in child processes that can be killed"
            ) from None
        return normalise(value)

    async def host(self, make: Callable[[], Awaitable[None]], timeout_s: float | None) -> None:
        await asyncio.wait_for(make(), timeout_s)

    def close(self) -> None:
        self._threads.close()


class ProcessRunner:
    """Any function, in child processes that are killed and replaced when they hang or crash."""

    def __init__(
        self,
        fn: str,
        kwargs: dict[str, Any],
        ctx: RewardContext,
        *,
        concurrency: int,
        timeout_s: float,
    ) -> None:
        # More processes than cores only wait for each other, each with its memory.
        self.width = max(1, min(concurrency, len(os.sched_getaffinity(0))))
        self._timeout_s = timeout_s
        spec = ChildSpec("roll.rewards.execution.runners:make_child_reward", (fn, kwargs, ctx))
        self._children = ChildPool(spec, self.width)
        self._threads = DaemonThreads(f"reward-{ctx.name}", max_hung=self.width + 1)

    async def run(self, sample: Sample) -> Reward:
        # No limit on the thread: the child's own limit always ends the call.
        value = await self._threads.run(
            lambda: self._children.call(sample, self._timeout_s), timeout_s=None
        )
        assert isinstance(value, Reward)
        return value

    async def host(self, make: Callable[[], Awaitable[None]], timeout_s: float | None) -> None:
        await asyncio.wait_for(make(), timeout_s)

    def close(self) -> None:
        self._threads.close()
        self._children.close()


def make_child_reward(
    fn: str, kwargs: dict[str, Any], ctx: RewardContext
) -> Callable[[Sample], Any]:
    """Runs in the child: the function that scores one sample there."""
    bound = load_reward(fn, kwargs, ctx)
    if bound.is_async:

        async def score_async(sample: Sample) -> Reward:
            return normalise(await bound.call(sample))

        return score_async
    return lambda sample: normalise(bound.call(sample))
