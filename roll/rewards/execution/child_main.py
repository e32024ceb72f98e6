"""The child's side of `child.py`: import a function, then answer calls until the parent is gone.

Two limits hold whatever the function does. Memory: an address-space limit, so that a hostile input
ends in MemoryError. Time, of the clock or of the CPU: the kernel's alarm with its default action
ends the process even while C code holds the interpreter, and also when the parent was killed and
nobody watches any more.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from roll.core.registry import load_object
from roll.rewards.execution.child import ChildSpec
from roll.rewards.execution.tracebacks import users_traceback

GRACE_S = 1.0
"""The parent's own clock should ring first; the alarm is for when the parent is gone."""
_CLOCKS = {"wall": signal.ITIMER_REAL, "cpu": signal.ITIMER_PROF}
"""Timers whose signals (SIGALRM, SIGPROF) end the process."""


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    with suppress(EOFError, ConnectionError, KeyboardInterrupt):
        spec: ChildSpec = pickle.loads(connection.recv_bytes())
        function = _start(connection, spec)
        if function is None:
            return
        if spec.fork:
            _supervise(connection, function, spec.clock)
        else:
            _serve(connection, function, grace_s=GRACE_S, clock=_CLOCKS[spec.clock])


def _supervise(connection: Connection, function: Callable[[Any], Any], clock: str) -> None:
    """Answer from a fork; when that dies, tell the parent and answer from another.

    The imports are done by then, so a fork takes milliseconds where a new child takes seconds.
    """
    while True:
        pid = os.fork()
        if pid == 0:
            with suppress(EOFError, ConnectionError, KeyboardInterrupt):
                _serve(connection, function, grace_s=0.0, clock=_CLOCKS[clock])
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == 0:
            return
        connection.send_bytes(pickle.dumps(("died", code)))


def _serve(
    connection: Connection, function: Callable[[Any], Any], *, grace_s: float, clock: int
) -> None:
    # One loop for all calls: clients that a function keeps are bound to the loop of their birth.
    loop = asyncio.new_event_loop()
    while True:
        argument, timeout_s = pickle.loads(connection.recv_bytes())
        signal.setitimer(clock, timeout_s + grace_s)
        answer = _answer(function, argument, loop)
        signal.setitimer(clock, 0)
        connection.send_bytes(answer)


def _start(connection: Connection, spec: ChildSpec) -> Callable[[Any], Any] | None:
    """The function to call; None when it cannot be made, which the parent has been told."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    try:
        function: Callable[[Any], Any] = load_object(spec.factory)(*spec.args)
    except BaseException as error:  # noqa: BLE001 - the process boundary: the parent gets the traceback
        connection.send_bytes(pickle.dumps(("raised", users_traceback(error))))
        return None
    if spec.memory_bytes is not None:
        limit = _address_space_bytes() + spec.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    connection.send_bytes(pickle.dumps(("result", None)))
    return function


def _answer(
    function: Callable[[Any], Any], argument: Any, loop: asyncio.AbstractEventLoop
) -> bytes:
    try:
        value = function(argument)
        if inspect.iscoroutine(value):
            value = loop.run_until_complete(value)
        return pickle.dumps(("result", value))
    except BaseException as error:  # noqa: BLE001 - the process boundary: the parent gets the traceback
        return pickle.dumps(("raised", users_traceback(error)))


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
