"""`Engine`: the interface of an inference engine as a replica uses it."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from roll.core.completion import Completion
from roll.core.types import GenerateRequest, Heartbeat


class Engine(Protocol):
    """Interface of an inference engine; every method may raise `EngineDiedError` or
    `WorkerLostError` if the engine is gone."""

    def generate(self, request: GenerateRequest) -> Awaitable[list[Completion]]:
        """Start a request; the awaitable gives `request.n` completions, in sibling order. After
        `abort` unfinished ones end with ABORT. Errors come from the awaitable alone.

        A coroutine is run as a task. A future costs the driver less.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a running request; ignore an unknown id."""
        ...

    async def heartbeat(self) -> Heartbeat:
        """Return token counts and the new pieces of running requests; return only if the engine
        works."""
        ...
