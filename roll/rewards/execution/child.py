"""Long-lived child process that runs one function and can be killed at any moment.

The parent holds a `Child` and calls it; the child (`child_main.py`) answers over a socket pair.
`multiprocessing` is not used, because its spawn method imports the main module of the parent again,
which is wrong for a Ray worker and for a script without a main guard.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

START_TIMEOUT_S = 120.0
"""Time in which the interpreter must start and import the function, in seconds; the import of torch
alone may take 20 s."""
KILL_TIMEOUT_S = 10.0
"""Time in which a killed process must end, in seconds."""
FORK_GRACE_S = 3.0
"""Time that the parent waits beyond the limit of a call, in seconds, if the child answers from a
fork. The fork's own alarm then rings first."""
STALL_FACTOR = 10.0
"""Default wall-clock limit of a call with a limit on CPU time, as a multiple of that limit."""


class ChildTimeoutError(Exception):
    """Error: the call exceeded its time limit; the process that ran the call is dead."""


class _NoAnswerError(ChildTimeoutError):
    """Error: the time limit of the parent ended the call, not the alarm of the child."""


class ChildStalledError(Exception):
    """Error: the child got too little CPU time from the machine.

    The call stayed below its limit on CPU time but exceeded the wall-clock limit of the caller.
    This does not mean that the call is faulty. The process that ran the call is dead.
    """


class ChildDiedError(Exception):
    """Error: the child died during a call, by a crash or by the out-of-memory killer."""


class ChildRaisedError(Exception):
    """Error: the function raised an exception; the message is the traceback of the child."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """Description of the function that a child runs.

    The child calls `factory(*args)` once; it returns the function that runs once per call.

    Example: ChildSpec("roll.rewards.math.equivalence:make_checker", (), memory_bytes=2**30)
    """

    factory: str
    """Import path `package.module:function`."""
    args: tuple[Any, ...] = ()
    """Arguments of `factory`; they must be picklable."""
    memory_bytes: int | None = None
    """Limit on the address space that the child may add after its start, in bytes; None sets no
    limit."""
    fork: bool = False
    """True: calls run in a fork of the child; after a timeout a new fork replaces it in
    milliseconds. Set it only if `factory` starts no threads: a fork has no copies of threads, but
    copies of their locks."""
    clock: Literal["wall", "cpu"] = "wall"
    """Clock of the time limit of a call. CPU time suits a function that only computes: the same
    call then ends the same way on a busy machine."""


class Child:
    """Handle of one child process; not thread-safe, runs one call at a time."""

    def __init__(self, spec: ChildSpec) -> None:
        """Keep the description; no process is started yet."""
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    @property
    def is_running(self) -> bool:
        """True from the start of the process until it is killed or found dead."""
        return self._process is not None

    def start(self) -> None:
        """Start the process and wait until the function is imported; do nothing if it runs.

        Raises:
            ChildRaisedError, ChildDiedError, ChildTimeoutError: the start failed.
            OSError: the limit on processes or open files is reached.
        """
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with ours, theirs:
            # In a new session Ctrl-C does not reach the child, and a kill of the process group also
            # ends the processes that the child has started.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "roll.rewards.execution.child_main", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_fileno() else subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
            self._connection = Connection(ours.detach())
        self._exchange(pickle.dumps(self._spec), START_TIMEOUT_S)

    def call(self, argument: Any, timeout_s: float, *, patience_s: float | None = None) -> Any:
        """Run the function on `argument` and return its result; start the child if it does not run.

        Args:
            argument: argument of the function; must be picklable.
            timeout_s: time limit of the call on the clock of the spec, in seconds.
            patience_s: wall-clock limit of a call with a limit on CPU time, in seconds; None means
                `STALL_FACTOR * timeout_s`.

        Raises:
            ChildRaisedError: the function raised an exception; the child lives on.
            ChildTimeoutError, ChildDiedError: the process that ran the call is dead. With `fork`
                the child itself may still live; see `is_running`. The next call starts a new
                process.
            ChildStalledError: the call exceeded `patience_s` without using up its CPU time; the
                child is dead.
            OSError: no child could be started.
        """
        self.start()
        message = pickle.dumps((argument, timeout_s))
        if self._spec.clock == "cpu":
            patience_s = timeout_s * STALL_FACTOR if patience_s is None else patience_s
            try:
                return self._exchange(message, patience_s)
            except _NoAnswerError as error:
                raise ChildStalledError(
                    f"no answer within {patience_s:g} s, in which it did not get its "
                    f"{timeout_s:g} s of CPU time; is the machine overloaded?"
                ) from error
        # The alarm of a fork should ring first: if this limit ends the call, the child is killed.
        return self._exchange(message, timeout_s + FORK_GRACE_S if self._spec.fork else timeout_s)

    def close(self) -> None:
        """Kill the process and its process group; do nothing if the process does not run."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=KILL_TIMEOUT_S)
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _exchange(self, message: bytes, timeout_s: float) -> Any:
        """Send a message and return its answer. Kill the child on any failure but an exception of
        the function or the alarm of a fork."""
        assert self._connection is not None
        try:
            self._connection.send_bytes(message)
            if not self._connection.poll(timeout_s):
                self.close()
                raise _NoAnswerError(f"no answer within {timeout_s:g} s")
            kind, value = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._died() from error
        except BaseException:
            # After Ctrl-C between send and receive, the next call would read the old answer.
            self.close()
            raise
        if kind == "died":
            if value in (-signal.SIGALRM, -signal.SIGPROF):
                raise ChildTimeoutError("the call ran out of time")
            # The fork may have died between two calls; the answer to this call would still come.
            self.close()
            raise ChildDiedError(f"the child process died ({_reason(value)})")
        if kind == "raised":
            raise ChildRaisedError(value)
        return value

    def _died(self) -> ChildDiedError | ChildTimeoutError:
        """Clean up after a child that ended by itself; return the error to raise: a timeout if its
        own alarm ended it."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        code = self._process.returncode
        self.close()
        if code in (-signal.SIGALRM, -signal.SIGPROF):
            return ChildTimeoutError("the child's own alarm rang")
        return ChildDiedError(f"the child process died ({_reason(code)})")


def _reason(code: int | None) -> str:
    """Return why a process ended: the name of the signal, or the exit code as text."""
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def _has_fileno() -> bool:
    """Return whether stderr has a file descriptor; captured streams (pytest, IDEs) have none."""
    try:
        sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True
