"""A long-lived child process that runs one function, and that can be killed at any moment.

The parent holds a `Child` and calls it; the child (`child_main.py`) answers over a socket pair.
Not `multiprocessing`: its spawn imports the parent's main module again, which for a Ray worker or
an unguarded script is wrong.
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
"""For the interpreter and the imports of the function; torch alone may take 20 s."""
KILL_TIMEOUT_S = 10.0
FORK_GRACE_S = 3.0
STALL_FACTOR = 10.0


class ChildTimeoutError(Exception):
    """The call took longer than its limit; what ran it is dead."""


class _NoAnswerError(ChildTimeoutError):
    """The parent's clock ran out, and not the child's alarm."""


class ChildStalledError(Exception):
    """The machine gave the child too little time: a limit on CPU time did not ring, but the caller
    waited as long as it would. Says nothing about the call; what ran it is dead."""


class ChildDiedError(Exception):
    """The child went away in the middle of a call (a crash, or the kernel's memory killer)."""


class ChildRaisedError(Exception):
    """The function raised inside the child; the message is the child's traceback."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What a child runs: `factory(*args)` once, and what that returns once per call.

    Example: ChildSpec("roll.rewards.math.equivalence:make_checker", (), memory_bytes=2**30)
    """

    factory: str
    """Import path."""
    args: tuple[Any, ...] = ()
    memory_bytes: int | None = None
    """Address space on top of what the child has after its start; None sets no limit."""
    fork: bool = False
    """Answer from a fork of the child, which is replaced in milliseconds when a call times out.
    Only for a factory that starts no threads: a fork has none of them, but all of their locks."""
    clock: Literal["wall", "cpu"] = "wall"
    """What the limit of a call measures. CPU time for what only computes: however busy the machine,
    the same call ends the same way."""


class Child:
    """One child process. Not thread-safe: one call at a time."""

    def __init__(self, spec: ChildSpec) -> None:
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    @property
    def is_running(self) -> bool:
        """False before the start and after a death."""
        return self._process is not None

    def start(self) -> None:
        """Start the process and wait until the function is imported; does nothing if it runs.

        Raises:
            ChildRaisedError, ChildDiedError, ChildTimeoutError: the start failed.
            OSError: the machine has no more processes or open files to give.
        """
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with ours, theirs:
            # A session of its own: Ctrl-C must not reach it, and a kill takes all it has started.
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
        """Run the function on `argument`; a fresh child is started where there is none.

        Args:
            timeout_s: limit of the call, on the clock of the spec.
            patience_s: with a limit on CPU time, how long to wait by the wall clock; left out,
                `STALL_FACTOR` times as long.

        Raises:
            ChildRaisedError: the function raised; the child lives on.
            ChildTimeoutError, ChildDiedError: what ran the call is gone; `is_running` says
                whether the child is, too. The next call starts another.
            ChildStalledError: the same, for want of CPU time.
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
        # A fork's own alarm rings first; if this clock did, the whole child would have to go.
        return self._exchange(message, timeout_s + FORK_GRACE_S if self._spec.fork else timeout_s)

    def close(self) -> None:
        """Kill the process and everything in its session."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=KILL_TIMEOUT_S)
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _exchange(self, message: bytes, timeout_s: float) -> Any:
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
            # Ctrl-C between send and receive would leave an answer that the next call takes as its.
            self.close()
            raise
        if kind == "died":
            if value in (-signal.SIGALRM, -signal.SIGPROF):
                raise ChildTimeoutError("the call ran out of time")
            # It may have died between two calls, and then the answer to this one is still to come.
            self.close()
            raise ChildDiedError(f"the child process died ({_reason(value)})")
        if kind == "raised":
            raise ChildRaisedError(value)
        return value

    def _died(self) -> ChildDiedError | ChildTimeoutError:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        code = self._process.returncode
        self.close()
        if code in (-signal.SIGALRM, -signal.SIGPROF):
            return ChildTimeoutError("the child's own alarm rang")
        return ChildDiedError(f"the child process died ({_reason(code)})")


def _reason(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def _has_fileno() -> bool:
    """False under pytest's and IDEs' captured streams."""
    try:
        sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True
