"""Runners of a reward function: on an event loop, in threads, or in child processes.

All have the same interface: `run(sample)` with a time limit, for at most `width` samples at once.
They raise the exception of the function, or TimeoutError; the pool counts these failures.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol

from roll.core.errors import RewardError
from roll.core.threads.bounded import BlockedLoopError, run_bounded
from roll.core.threads.daemon_threads import DaemonThreads, TooManyHungError
from roll.core.threads.loop_thread import LoopThread
from roll.core.types import Sample
from roll.rewards.api import RewardContext
from roll.rewards.execution.child import ChildSpec
from roll.rewards.execution.child_pool import ChildPool
from roll.rewards.loading import BoundReward, Work, load_reward

MAX_HUNG_THREADS = 8
"""Number of calls that may hang in a thread; once this many hang, the next call stops the run."""
CLOSE_TIMEOUT_S = 0.2
"""Time to close the event loop of an `async` reward, in seconds; short, because closing blocks the
event loop of the worker."""


class Runner(Protocol):
    """Interface of the runners of a reward function; see the module docstring."""

    @property
    def width(self) -> int:
        """Number of samples that may run at once."""
        ...

    async def run(self, work: Work) -> Any:
        """Score one sample, or one group; return its reward, or the list of its rewards.

        Raises:
            TimeoutError: the function took longer than its time limit.
            Exception: the exception of the function.
        """
        ...

    async def host(self, make: Callable[[], Awaitable[None]], timeout_s: float | None) -> None:
        """Await `make()` on the event loop of the function if it has one, else on the caller's.

        Clients that `make` opens work only on the loop on which they are opened.
        """
        ...

    def close(self) -> None: ...


class LoopRunner:
    """Runner of an `async` function on a separate event loop; the function must not block.

    All samples share the loop, so one call that blocks the loop for good stops the run. A
    `timeout_s` of None is for functions that have time limits of their own.
    """

    def __init__(
        self, name: str, bound: BoundReward, *, width: int, timeout_s: float | None
    ) -> None:
        """Start an event loop in a thread.

        Args:
            name: name of the reward.
            bound: its function.
            width: number of samples that may run at once.
            timeout_s: time limit of each call, in seconds; None: no limit.
        """
        self._name = name
        self._bound = bound
        self.width = width
        self._timeout_s = timeout_s
        self._loop = LoopThread(f"reward-{name}", cancel_timeout_s=CLOSE_TIMEOUT_S)

    async def run(self, work: Work) -> Any:
        """Score a sample or group; see `Runner`.

        Raises:
            RewardError: a call blocks the loop, so that no time limit can end it; the run must
                stop.
        """
        try:
            value = await run_bounded(self._loop, lambda: self._bound.call(work), self._timeout_s)
            return self._bound.result(work, value)
        except BlockedLoopError as error:
            assert self._timeout_s is not None, "only a time limit finds a blocked loop"
            raise RewardError(
                f"reward {self._name!r} is `async` but blocks: {_name(work)} ran out of its "
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
    """Runner of a plain function in threads of this process."""

    def __init__(self, name: str, bound: BoundReward, *, width: int, timeout_s: float) -> None:
        """Prepare the runner.

        Args:
            name: name of the reward.
            bound: its function.
            width: number of samples that may run at once.
            timeout_s: time limit of each call, in seconds.
        """
        self._name = name
        self._bound = bound
        self.width = width
        self._timeout_s = timeout_s
        self._threads = DaemonThreads(f"reward-{name}", max_hung=MAX_HUNG_THREADS)

    async def run(self, work: Work) -> Any:
        """Score a sample or group; see `Runner`.

        Raises:
            RewardError: `MAX_HUNG_THREADS` calls hang; the run must stop.
        """
        try:
            value = await self._threads.run(lambda: self._bound.call(work), self._timeout_s)
        except TooManyHungError as error:
            raise RewardError(
                f"reward {self._name!r}: {error} within {self._timeout_s:g} s and hold a thread "
                f"each, which nothing can kill; set rewards.{self._name}.in_process: false to run "
                "it in child processes that can be killed"
            ) from None
        return self._bound.result(work, value)

    async def host(self, make: Callable[[], Awaitable[None]], timeout_s: float | None) -> None:
        await asyncio.wait_for(make(), timeout_s)

    def close(self) -> None:
        self._threads.close()


class ProcessRunner:
    """Runner of any function in child processes; those that hang or crash are replaced."""

    def __init__(
        self,
        fn: str,
        kwargs: dict[str, Any],
        ctx: RewardContext,
        *,
        concurrency: int,
        timeout_s: float,
        clock: Literal["wall", "cpu"] = "wall",
    ) -> None:
        """Prepare the runner; children start when they are needed.

        Args:
            fn, kwargs, ctx: see `load_reward`; the children load the function.
            concurrency: largest number of children; there are never more than cores.
            timeout_s: time limit of each call, in seconds.
            clock: clock of this limit.
        """
        # More processes than cores would use more memory and not be faster.
        self.width = max(1, min(concurrency, len(os.sched_getaffinity(0))))
        self._timeout_s = timeout_s
        factory = "roll.rewards.execution.runners:make_child_reward"
        spec = ChildSpec(factory, (fn, kwargs, ctx), clock=clock)
        self._children = ChildPool(spec, self.width)
        self._threads = DaemonThreads(f"reward-{ctx.name}", max_hung=self.width + 1)

    async def run(self, work: Work) -> Any:
        """Score a sample or group in a child; see `Runner`. For further errors see
        `ChildPool.call`."""
        # The thread needs no time limit, because the time limit of the child always ends the call.
        return await self._threads.run(
            lambda: self._children.call(work, self._timeout_s), timeout_s=None
        )

    async def host(self, make: Callable[[], Awaitable[None]], timeout_s: float | None) -> None:
        await asyncio.wait_for(make(), timeout_s)

    def close(self) -> None:
        self._threads.close()
        self._children.close()


def _name(work: Work) -> str:
    """Return the name of a sample or group for error messages."""
    return f"sample {work.id}" if isinstance(work, Sample) else f"group {work[0].group}"


def make_child_reward(fn: str, kwargs: dict[str, Any], ctx: RewardContext) -> Callable[[Work], Any]:
    """Load the reward and return the function that scores one sample or group; called in the child
    process.

    The function is async for an async reward.
    """
    bound = load_reward(fn, kwargs, ctx)
    if bound.is_async:

        async def score_async(work: Work) -> Any:
            return bound.result(work, await bound.call(work))

        return score_async
    return lambda work: bound.result(work, bound.call(work))
