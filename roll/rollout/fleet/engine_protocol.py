"""`Engine`: the interface of an inference engine as a replica uses it."""

from __future__ import annotations

from typing import Protocol

from roll.core.completion import Completion
from roll.core.types import GenerateRequest, Heartbeat


class Engine(Protocol):
    """Interface of an inference engine; every method may raise `EngineDiedError` or
    `WorkerLostError` if the engine is gone."""

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Return `request.n` completions, in sibling order; after `abort` unfinished ones end with
        ABORT."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a running request; ignore an unknown id."""
        ...

    async def heartbeat(self) -> Heartbeat:
        """Return token counts and the new pieces of running requests; return only if the engine
        works."""
        ...
