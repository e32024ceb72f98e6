"""`Engine`: what a replica asks of its inference engine."""

from __future__ import annotations

from typing import Protocol

from roll.core.types import Completion, GenerateRequest, Heartbeat


class Engine(Protocol):
    """What a replica asks of its engine; all of it may fail with `EngineDiedError` or
    `WorkerLostError` when the engine is gone."""

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """`request.n` completions, in sibling order; after `abort` they end with ABORT."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a running request; unknown ids are fine."""
        ...

    async def heartbeat(self) -> Heartbeat:
        """Comes back only from an engine that works."""
        ...
