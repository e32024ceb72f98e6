"""Handles to inference replicas: requests go in as there is room, their end is accounted for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from roll.core.errors import WaitTimeoutError
from roll.core.types import Completion, GenerateRequest
from roll.rollout.turnstile import Turnstile

logger = logging.getLogger(__name__)

ABORT_AGAIN_S = 1.0
"""Pause between two aborts of a request that has not ended."""


@dataclass(eq=False)
class Replica:
    """One engine and what is under way on it. All calls come from one event loop."""

    index: int
    generate: Callable[[GenerateRequest], Awaitable[list[Completion]]]
    abort: Callable[[str], Awaitable[None]]
    """Ends a request by id; its `generate` then returns."""
    capacity: int = 256
    """Sequences it decodes at once; requests beyond wait here, first come first served. One that
    is larger by itself is sent alone."""
    abort_timeout_s: float = 30.0
    """How long an aborted request may take to end."""
    in_flight_tokens: int = field(default=0, init=False)
    """Prompt tokens plus the most that may still be written, over all requests sent or waiting."""
    in_flight_sequences: int = field(default=0, init=False)
    _turnstile: Turnstile = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._turnstile = Turnstile(self.capacity)

    @property
    def has_room(self) -> bool:
        return self.in_flight_sequences < self.capacity

    async def run(self, request: GenerateRequest, *, timeout_s: float) -> list[Completion]:
        """The request's completions. However this ends, the engine does not work on it any more.

        The clock starts when the request is sent. The wait before that ends by itself: each of
        those ahead has `timeout_s`, too.

        Raises:
            WaitTimeoutError: no answer within `timeout_s`; names request and replica.
        """
        self._count(request, 1)
        try:
            async with self._turnstile.inside(request.n):
                return await self._send(request, timeout_s)
        finally:
            self._count(request, -1)

    async def _send(self, request: GenerateRequest, timeout_s: float) -> list[Completion]:
        call = asyncio.ensure_future(self.generate(request))
        try:
            await asyncio.wait([call], timeout=timeout_s)
            if not call.done():
                raise WaitTimeoutError(
                    f"request {request.id} ({request.n} x up to "
                    f"{request.sampling.max_new_tokens} tokens) on inference replica {self.index} "
                    f"did not finish within {timeout_s:g} s; raise rollout.request_timeout_s or "
                    "lower sampling.max_new_tokens"
                )
            return call.result()
        finally:
            if not call.done():
                await self._stop(request, call)

    async def _stop(self, request: GenerateRequest, call: asyncio.Future[list[Completion]]) -> None:
        """Abort, and wait until the engine says that the request is over.

        A failure in here is only logged: the caller is already leaving, with an error or because
        nobody wants the result, and that is what should be heard.
        """

        async def insist() -> None:
            # An abort may overtake its own request, and engines ignore ids they do not know yet.
            while not call.done():
                await self.abort(request.id)
                await asyncio.wait([call], timeout=ABORT_AGAIN_S)

        stopping = asyncio.ensure_future(insist())
        try:
            await asyncio.wait([stopping], timeout=self.abort_timeout_s)
        finally:
            ended = call.done()
            stopping.cancel()
            call.cancel()
            results = await asyncio.gather(stopping, call, return_exceptions=True)
            errors = [repr(r) for r in results if isinstance(r, Exception)]
            if errors or not ended:
                logger.warning(
                    "request %s on inference replica %d: abort failed: %s",
                    request.id,
                    self.index,
                    "; ".join(errors) or f"it did not end within {self.abort_timeout_s:g} s",
                )

    def _count(self, request: GenerateRequest, sign: int) -> None:
        tokens = len(request.prompt_tokens) + request.n * request.sampling.max_new_tokens
        self.in_flight_tokens += sign * tokens
        self.in_flight_sequences += sign * request.n
