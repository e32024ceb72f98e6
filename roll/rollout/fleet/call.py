"""`Call`: one request that runs on a replica, with the tokens known from heartbeats and with the
ways to stop the request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from roll.core.completion import Completion, FinishReason
from roll.core.errors import EngineError
from roll.core.types import GenerateRequest, Piece
from roll.rollout.fleet.engine_protocol import Engine
from roll.rollout.fleet.partial_completions import KnownTokens

ABORT_AGAIN_S = 1.0
"""Pause between two aborts of a request that has not ended, in seconds."""


class ReplicaLostError(EngineError):
    """Error of a request whose replica is lost or has incomplete weights; carries the tokens that
    the replica is known to have written."""

    def __init__(self, message: str, written: tuple[Completion, ...]) -> None:
        """Make the error; `written` holds the known tokens of each sibling, in sibling order."""
        super().__init__(message)
        self.written = written
        """Known tokens of each sibling, in sibling order."""


@dataclass(eq=False, slots=True)
class Call:
    """Request that runs on a replica."""

    request: GenerateRequest
    timeout_s: float
    """Longest time without progress of the replica, in seconds."""
    begun_s: float
    """Time at which the request began, on the clock of the event loop."""
    outcome: asyncio.Future[list[Completion]]
    """Result for the caller that waits: the completions, or the error of the request."""
    answer: asyncio.Future[list[Completion]]
    """Answer of the engine to this request."""
    heard: list[KnownTokens] = field(default_factory=list)
    """Tokens known from heartbeats, one entry per sibling; empty before the first heartbeat."""
    ended: int = 0
    """Number of siblings that have ended and whose places on the replica are free again."""

    def left_s(self, moved_s: float, now_s: float) -> float:
        """Return the seconds from `now_s` until the request is overdue, if the replica has made
        progress at `moved_s` for the last time; infinity once the outcome is known."""
        if self.outcome.done():
            return inf
        return max(self.begun_s, moved_s) + self.timeout_s - now_s

    def hear(self, news: Sequence[Piece]) -> int:
        """Add one piece for each sibling; return how many siblings, of all of them, have ended
        according to these pieces."""
        if not self.heard:
            self.heard = [KnownTokens() for _ in range(self.request.n)]
        ended, running = 0, FinishReason.ABORT
        for sibling, piece in zip(self.heard, news, strict=True):
            sibling.add(piece)
            if piece.written.finish is not running:
                ended += 1
        return ended

    def fail(self, reason: str) -> None:
        """Make `outcome` fail with `ReplicaLostError`, unless it is set already."""
        if not self.outcome.done():
            heard = self.heard or [KnownTokens() for _ in range(self.request.n)]
            written = tuple(sibling.so_far() for sibling in heard)
            self.outcome.set_exception(ReplicaLostError(reason, written))

    async def abort(self, engine: Engine, timeout_s: float) -> None:
        """Ask the engine again and again to end the request, until it has answered or `timeout_s`
        seconds have passed."""
        aborting = asyncio.ensure_future(self._insist(engine))
        await asyncio.wait([aborting], timeout=timeout_s)
        aborting.cancel()
        await asyncio.gather(aborting, return_exceptions=True)

    async def stop(self, engine: Engine, timeout_s: float) -> str:
        """Abort the request, wait until the engine has ended it, and drop its answer.

        Returns:
            The errors as a text, or that the request did not end; empty if neither happened.
        """
        aborting = asyncio.ensure_future(self._insist(engine))
        try:
            await asyncio.wait([aborting], timeout=timeout_s)
        finally:
            ended = self.answer.done()
            aborting.cancel()
            self.answer.cancel()
            results = await asyncio.gather(aborting, self.answer, return_exceptions=True)
        errors = [repr(result) for result in results if isinstance(result, Exception)]
        return "; ".join(errors) or ("" if ended else f"it did not end within {timeout_s:g} s")

    async def _insist(self, engine: Engine) -> None:
        """Ask the engine every `ABORT_AGAIN_S` seconds to end the request, until it answers."""
        # The abort may reach the engine before the request, and engines ignore unknown ids.
        while not self.answer.done():
            await engine.abort(self.request.id)
            await asyncio.wait([self.answer], timeout=ABORT_AGAIN_S)
