"""`Mailbox`: requests of a worker that wait for the driver, which knows who can answer them."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar


class _Numbered(Protocol):
    """Request with an id."""

    @property
    def id(self) -> str: ...


Q = TypeVar("Q", bound=_Numbered)
A = TypeVar("A")


class NoAnswerError(Exception):
    """Error: those who could answer gave no answer."""


class Mailbox(Generic[Q, A]):
    """Requests and their answers, which must not be texts. `ask` may run on another event loop than
    the other methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[Q] = []
        self._open: dict[str, Future[A]] = {}
        self._taker: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    async def ask(self, request: Q) -> A:
        """Leave a request, and wait for its answer.

        Raises:
            NoAnswerError: there is none; the message says why.
        """
        answer: Future[A] = Future()
        with self._lock:
            self._new.append(request)
            self._open[request.id] = answer
            taker = self._taker
        if taker is not None:
            loop, some = taker
            loop.call_soon_threadsafe(some.set)
        try:
            return await asyncio.wrap_future(answer)
        finally:
            with self._lock:
                self._open.pop(request.id, None)

    async def take(self, wait_s: float) -> list[Q]:
        """Return the requests since the last call; wait at most `wait_s` seconds for the first."""
        some = asyncio.Event()
        with self._lock:
            self._taker = asyncio.get_running_loop(), some
            if self._new:
                some.set()
        try:
            async with asyncio.timeout(wait_s):
                await some.wait()
        except TimeoutError:
            pass
        with self._lock:
            self._taker = None
            new, self._new = self._new, []
        return new

    def give(self, request_id: str, answer: A | str) -> None:
        """Answer a request; a text says why there is no answer. Nobody may wait any more."""
        with self._lock:
            waiting = self._open.pop(request_id, None)
        if waiting is None or not waiting.set_running_or_notify_cancel():
            return
        if isinstance(answer, str):
            waiting.set_exception(NoAnswerError(answer))
        else:
            waiting.set_result(answer)
