"""`Call`: one request on its way on a replica: what heartbeats have told of it, and how it is
stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from roll.core.errors import EngineError
from roll.core.types import Completion, FinishReason, GenerateRequest, Piece
from roll.rollout.fleet.engine_protocol import Engine
from roll.rollout.fleet.partial_completions import HeardTokens

ABORT_AGAIN_S = 1.0
"""Pause between two aborts of a request that has not ended."""


class ReplicaLostError(EngineError):
    """The replica of a request is gone, or has no whole weights any more; carries what is known to
    be written."""

    def __init__(self, message: str, written: tuple[Completion, ...]) -> None:
        super().__init__(message)
        self.written = written
        """Of each sibling."""


@dataclass(eq=False)
class Call:
    """One request on its way."""

    request: GenerateRequest
    outcome: asyncio.Future[list[Completion]]
    """What whoever waits for the request gets."""
    task: asyncio.Task[list[Completion]]
    """The engine's answer."""
    heard: list[HeardTokens] = field(default_factory=list)
    """One for each sibling, from the first heartbeat on."""
    ended: int = 0
    """Siblings whose places are free again."""

    def hear(self, news: Sequence[Piece]) -> int:
        """Take in one piece for each sibling; returns how many siblings it shows to have ended."""
        if not self.heard:
            self.heard = [HeardTokens() for _ in range(self.request.n)]
        for sibling, piece in zip(self.heard, news, strict=True):
            sibling.add(piece)
        return sum(piece.written.finish is not FinishReason.ABORT for piece in news)

    def fail(self, reason: str) -> None:
        """End the wait with `ReplicaLostError`."""
        if not self.outcome.done():
            heard = self.heard or [HeardTokens() for _ in range(self.request.n)]
            written = tuple(sibling.so_far() for sibling in heard)
            self.outcome.set_exception(ReplicaLostError(reason, written))

    async def abort(self, engine: Engine, timeout_s: float) -> None:
        """Ask the engine to end it, which `task` then tells; for `timeout_s` at most."""
        aborting = asyncio.ensure_future(self._insist(engine))
        await asyncio.wait([aborting], timeout=timeout_s)
        aborting.cancel()
        await asyncio.gather(aborting, return_exceptions=True)

    async def stop(self, engine: Engine, timeout_s: float) -> str:
        """Abort, wait until the engine says that the request is over, and drop its answer.

        Returns:
            What went wrong; empty where nothing did.
        """
        aborting = asyncio.ensure_future(self._insist(engine))
        try:
            await asyncio.wait([aborting], timeout=timeout_s)
        finally:
            ended = self.task.done()
            aborting.cancel()
            self.task.cancel()
            results = await asyncio.gather(aborting, self.task, return_exceptions=True)
        errors = [repr(result) for result in results if isinstance(result, Exception)]
        return "; ".join(errors) or ("" if ended else f"it did not end within {timeout_s:g} s")

    async def _insist(self, engine: Engine) -> None:
        # An abort may overtake its own request, and engines ignore ids they do not know yet.
        while not self.task.done():
            await engine.abort(self.request.id)
            await asyncio.wait([self.task], timeout=ABORT_AGAIN_S)
