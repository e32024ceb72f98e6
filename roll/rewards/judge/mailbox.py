"""`Mailbox`: requests of a worker that wait for the driver, which knows the engines."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

from roll.core.completion import Completion
from roll.core.types import GenerateRequest


class NoAnswerError(Exception):
    """Error: the engines of a judge gave no answer."""


class Mailbox:
    """Requests and their answers. `ask` may run on another event loop than the other methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[GenerateRequest] = []
        self._open: dict[str, Future[Completion]] = {}
        self._taker: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    async def ask(self, request: GenerateRequest) -> Completion:
        """Leave a request, and wait for its answer.

        Raises:
            NoAnswerError: the engines gave none; the message says why.
        """
        answer: Future[Completion] = Future()
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

    async def take(self, wait_s: float) -> list[GenerateRequest]:
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

    def give(self, request_id: str, answer: Completion | str) -> None:
        """Answer a request; a text says why there is no answer. Nobody may wait any more."""
        with self._lock:
            waiting = self._open.pop(request_id, None)
        if waiting is None or not waiting.set_running_or_notify_cancel():
            return
        if isinstance(answer, str):
            waiting.set_exception(NoAnswerError(answer))
        else:
            waiting.set_result(answer)
