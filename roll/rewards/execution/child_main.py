"""Main program of a child process: imports a function, then answers calls until the parent ends.

The parent's side is `child.py`. Two limits always hold. A limit on the address space makes a
hostile input end with MemoryError. A limit on the wall-clock or CPU time is an alarm of the kernel
with its default action: it ends the process even while C code holds the interpreter, and also after
the parent was killed.
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

from roll.config.user_code.import_path import load_object
from roll.config.user_code.tracebacks import users_traceback
from roll.rewards.execution.child import ChildSpec

GRACE_S = 1.0
"""Time beyond the wall-clock limit of a call until the alarm of a child without fork rings, in
seconds. The limit of the parent ends the call first; the alarm is needed only if the parent is
gone."""
_CLOCKS = {"wall": signal.ITIMER_REAL, "cpu": signal.ITIMER_PROF}
"""Timers of the kernel for each clock; their signals (SIGALRM, SIGPROF) end the process."""


def main() -> None:
    """Load the function that the parent sends, then answer calls until the parent hangs up; in
    forks if the spec says so."""
    connection = Connection(int(sys.argv[1]))
    with suppress(EOFError, ConnectionError, KeyboardInterrupt):
        spec: ChildSpec = pickle.loads(connection.recv_bytes())
        function = _start(connection, spec)
        if function is None:
            return
        if spec.fork:
            _supervise(connection, function, spec.clock)
        else:
            # Of CPU time only this alarm knows; of wall-clock time the parent knows first.
            grace_s = GRACE_S if spec.clock == "wall" else 0.0
            _serve(connection, function, grace_s=grace_s, clock=_CLOCKS[spec.clock])


def _supervise(connection: Connection, function: Callable[[Any], Any], clock: str) -> None:
    """Answer calls in a fork; if the fork dies, report its exit code and start another fork.

    A fork starts in milliseconds, because the imports are done already; a new child takes seconds.
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
    """Answer calls until the parent hangs up; an alarm kills this process `grace_s` after the time
    limit of a call."""
    # One loop for all calls: a client that the function keeps works only on the loop that made it.
    loop = asyncio.new_event_loop()
    while True:
        argument, timeout_s = pickle.loads(connection.recv_bytes())
        signal.setitimer(clock, timeout_s + grace_s)
        answer = _answer(function, argument, loop)
        signal.setitimer(clock, 0)
        connection.send_bytes(answer)


def _start(connection: Connection, spec: ChildSpec) -> Callable[[Any], Any] | None:
    """Set the memory limit and return the function; report the result of the start to the parent.

    Returns None if the factory failed; the parent then has its traceback.
    """
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
    """Run the function, a coroutine on `loop`; return its pickled result, or the traceback of
    whatever it raised."""
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
