"""Program of the process that runs SGLang: `python -m roll.strategy.sglang.server FD FOLDER`.

SGLang needs a process of its own: its launcher installs signal handlers, replaces the event loop
and, when a child process fails, kills its own process and all below it. So the worker talks to this
process over the socket FD. When the worker ends, the socket closes and this process ends too; it
removes FOLDER, in which SGLang leaves temporary files, because a killed worker cannot.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from pathlib import Path

from roll.core.errors import EngineError, RollError
from roll.strategy.sglang.messages import (
    Answer,
    Call,
    StartMessage,
    read,
    read_now,
    write,
    write_now,
)
from roll.strategy.sglang.replica import Replica, build

STAND_INS = Path(__file__).parent / "stand_ins"


def main(fd: int, folder: str) -> None:
    """Start SGLang as the first message says, serve calls until the worker ends, and remove the
    folder.

    If the engine cannot start, send the error as answer 0, then raise it.

    Args:
        fd: file descriptor of the socket to the worker.
        folder: folder for temporary files of this process.
    """
    try:
        _run(socket.socket(fileno=fd))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(connection: socket.socket) -> None:
    """Do what `main` does, but for the folder."""
    order: StartMessage = read_now(connection)
    if order.cpu:
        sys.path.append(str(STAND_INS))
    try:
        engine = build(order.arguments)
        replica = Replica(engine, order)
    except Exception as error:
        write_now(connection, Answer(0, error=_known(error)))
        raise
    try:
        engine.loop.run_until_complete(_serve(connection, replica))
    finally:
        engine.shutdown()


async def _serve(connection: socket.socket, replica: Replica) -> None:
    """Send this process's id as answer 0, then answer calls, each in a task of its own.

    Return when the worker closes its end or dies; calls under way are dropped.
    """
    reader, writer = await asyncio.open_connection(sock=connection)
    write(writer, Answer(0, os.getpid()))
    tasks: set[asyncio.Task[None]] = set()
    while True:
        try:
            call: Call = await read(reader)
        except (EOFError, ConnectionError):
            return
        task = asyncio.create_task(_answer(writer, replica, call))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _answer(writer: asyncio.StreamWriter, replica: Replica, call: Call) -> None:
    """Run a call and send its result or its exception, as `_known` makes it."""
    try:
        value = await call.method(replica, *call.arguments, **call.options)
    except Exception as error:  # noqa: BLE001 - sent back: the worker raises it again
        write(writer, Answer(call.id, error=_known(error)))
    else:
        write(writer, Answer(call.id, value))


def _known(error: Exception) -> Exception:
    """Return a RollError unchanged, else an EngineError, which the worker can unpickle."""
    if isinstance(error, RollError):
        return error
    return EngineError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
