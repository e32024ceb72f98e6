"""`Calls`: calls methods of the `Replica` at the other end of a socket, many at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from roll.strategy.sglang.messages import Answer, Call, StartMessage, read, write
from roll.strategy.sglang.replica import Replica

P = ParamSpec("P")
R = TypeVar("R")


class Calls:
    """The worker's end of the socket. One task reads the answers and gives each to its caller.

    Args:
        connection: a stream socket; `end` closes it.
        name: name of the other end in error messages.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection = connection
        self._name = name
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._next_id = 1
        self._ended = False
        self._listening: asyncio.Task[None] | None = None

    async def begin(self, order: StartMessage) -> None:
        """Let SGLang's process start its engine; return when it is ready for calls.

        Args:
            order: message that says how to start; it is the first one through the socket.

        Raises:
            EngineError: the engine could not start.
            ConnectionError: the other process ended without an answer.
        """
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        self._listening = asyncio.create_task(self._listen(reader))
        up = self._waiting[0] = asyncio.get_running_loop().create_future()
        write(self._writer, order)
        await up

    def call(
        self,
        method: Callable[Concatenate[Replica, P], Coroutine[Any, Any, R]],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> asyncio.Future[R]:
        """Run `method` at the other end.

        Returns:
            A future of the method's result or error; of a ConnectionError if the other process has
            ended. Cancelling it does not end the method.
        """
        waiting: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        if self._ended:
            waiting.set_exception(self._error())
            return waiting
        id, self._next_id = self._next_id, self._next_id + 1
        self._waiting[id] = waiting
        write(self._writer, Call(id, method, arguments, options))
        return waiting

    def end(self) -> None:
        """Close the socket, which tells the other process to end; calls under way fail."""
        if self._listening is not None:
            self._listening.cancel()
            self._writer.close()
        else:
            self._connection.close()
        self._end()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Give each answer to its caller, until the other process ends."""
        try:
            while True:
                answer: Answer = await read(reader)
                waiting = self._waiting.pop(answer.id)
                if waiting.done():
                    continue  # the caller has given up
                if answer.error is not None:
                    waiting.set_exception(answer.error)
                else:
                    waiting.set_result(answer.value)
        except (EOFError, ConnectionError):
            self._end()

    def _end(self) -> None:
        """Fail all calls that wait for an answer, and from now on all new ones."""
        self._ended = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._error())
        self._waiting.clear()

    def _error(self) -> ConnectionError:
        """Return the error of calls to a process that has ended."""
        return ConnectionError(f"{self._name} is not running; its own log says why")
