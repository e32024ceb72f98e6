"""`AgentRunner`: runs agents beside the event loop of the endpoint that they ask.

An agent may block its event loop: a client that is not `async` waits for the answer of the policy.
On the loop of the endpoint that would be a deadlock in which no time limit fires.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from roll.core.errors import HostSpentError
from roll.core.threads.bounded import BlockedLoopError, expect_life
from roll.core.threads.daemon_threads import DaemonThreads, TooManyHungError
from roll.core.threads.loop_thread import LoopThread
from roll.core.threads.user_errors import passable
from roll.envs.agents.api import AgentTask

logger = logging.getLogger(__name__)

MAX_HUNG_THREADS = 256
"""Number of plain agents that may hang by default."""
MAX_BLOCKED_LOOPS = 32
"""The same number of blocked event loops."""
TURN_S = 2.0
"""Longest wait for a turn on an event loop that may be blocked, in seconds."""
CLOSE_S = 1.0
"""Time in which agents that are cancelled may clean up, in seconds."""


@dataclass(eq=False)
class AgentRun:
    """Agent that runs, or has ended."""

    ended: asyncio.Future[Any]
    """Result, on the event loop of the caller; cancelling it cancels an `async` agent."""
    loop: LoopThread | None = None
    """Event loop of the agent; None for a plain function."""
    left: Future[None] = field(default_factory=Future)
    """Runs while an `async` agent does: other than `ended`, also while it cleans up."""


@dataclass(eq=False)
class AgentRunner:
    """Runs a function of the user: on an event loop that all agents share if it is `async`, else in
    a thread for each. A shared loop that is blocked gets a successor for later agents."""

    name: str
    """Name of the environment in the config."""
    function: Callable[[AgentTask], Any]
    """Function of the user that runs an agent and returns the reward."""
    max_hung: int = MAX_HUNG_THREADS
    """Number of plain agents that may hang; once this many hang, no other begins."""
    max_blocked: int = MAX_BLOCKED_LOOPS
    """Number of blocked event loops from which on a blocked one gets no successor."""
    _threads: DaemonThreads = field(init=False)
    _loops: list[LoopThread] = field(default_factory=list, init=False)
    """Event loops; the last one is for agents that begin."""

    def __post_init__(self) -> None:
        """Start no thread yet."""
        self._threads = DaemonThreads(f"agent-{self.name}", max_hung=self.max_hung)

    def begin(self, task: AgentTask, wanted: Callable[[], bool]) -> AgentRun:
        """Start an agent; return at once.

        Args:
            wanted: tells whether the episode still runs; errors of an agent are dropped after its
                end. It is called in another thread.
        """
        if not inspect.iscoroutinefunction(self.function):
            return AgentRun(asyncio.ensure_future(self._in_thread(task)))
        if not self._loops:
            self._begin_loop()
        loop, left = self._loops[-1], Future[None]()
        result = loop.submit(self._on_loop(task, wanted, left))
        return AgentRun(asyncio.wrap_future(result), loop, left)

    async def end(self, run: AgentRun) -> None:
        """Cancel an agent, and give it a limited time to clean up."""
        run.ended.cancel()
        await asyncio.wait([run.ended], timeout=CLOSE_S)
        if run.ended.done() and not run.ended.cancelled():
            run.ended.exception()  # asyncio logs one that nobody asks for
        if run.left.running():
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(run.left), CLOSE_S)

    async def why_late(self, run: AgentRun, limit_s: float) -> str:
        """Return why an agent may be late, to follow the message; empty if nothing is known. Later
        agents begin on a new event loop if this one is blocked.

        Args:
            limit_s: time limit that the agent exceeded, in seconds; the wait here is no longer.

        Raises:
            HostSpentError: too many event loops are blocked.
        """
        if run.loop is None:
            return ""
        try:
            await expect_life(run.loop, min(limit_s, TURN_S))
        except BlockedLoopError as error:
            if run.loop is self._loops[-1]:
                if len(self._loops) > self.max_blocked:
                    raise HostSpentError(
                        f"environment {self.name!r}: agents block {len(self._loops)} event loops, "
                        f"so that no other can begin: {error}"
                    ) from None
                self._begin_loop()
            return (
                f"; it, or another agent on its event loop, is `async` but blocks: {error}. Await "
                "what takes time, wrap a blocking call in `asyncio.to_thread`, or make the "
                "function a plain `def`, which runs in a thread"
            )
        return ""

    async def close(self) -> None:
        """End the threads that do not hang; cancel agents that still run."""
        loops, self._loops = self._loops, []
        # Beside the endpoint, which agents that clean up may still ask.
        await asyncio.gather(*(asyncio.to_thread(loop.close) for loop in loops))
        self._threads.close()

    def _begin_loop(self) -> None:
        """Start an event loop for the agents that begin from now on."""
        self._loops.append(LoopThread(f"agent-{self.name}", cancel_timeout_s=CLOSE_S))

    async def _in_thread(self, task: AgentTask) -> Any:
        """Run an agent that is a plain function.

        Raises:
            HostSpentError: too many agents hang.
        """
        try:
            # The host has the time limits, and cancels; the thread of an agent that hangs stays.
            return await self._threads.run(lambda: self.function(task), None, count_cancelled=True)
        except TooManyHungError as error:
            raise HostSpentError(
                f"environment {self.name!r}: no agent can begin: {error} and hold a thread each, "
                "which nothing can kill; give what they wait for a time limit"
            ) from None

    async def _on_loop(
        self, task: AgentTask, wanted: Callable[[], bool], left: Future[None]
    ) -> Any:
        """Run an `async` agent, on its loop; settle `left` when it has ended."""
        left.set_running_or_notify_cancel()
        try:
            return await self.function(task)
        except Exception as error:
            if wanted():
                raise
            # Nobody waits any more, for whom asyncio would log it as never retrieved.
            logger.debug("an agent of %r failed after its episode: %r", self.name, error)
            return None
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            raise passable(error) from error
        finally:
            left.set_result(None)
