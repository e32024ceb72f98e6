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
from typing import Any

START_TIMEOUT_S = 120.0
"""For the interpreter and the imports of the function; torch alone may take 20 s."""
KILL_TIMEOUT_S = 10.0
FORK_GRACE_S = 3.0


class ChildTimeoutError(Exception):
    """The call took longer than its limit; what ran it is dead."""


class ChildDiedError(Exception):
    """The child went away in the middle of a call (a crash, or the kernel's memory killer)."""


class ChildRaisedError(Exception):
    """The function raised inside the child; the message is the child's traceback."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What a child runs: `factory(*args)` once, and what that returns once per call.

    Example: ChildSpec("roll.rewards.equivalence:make_checker", (), memory_bytes=2**30)
    """

    factory: str
    """Import path."""
    args: tuple[Any, ...] = ()
    memory_bytes: int | None = None
    """Address space on top of what the child has after its start; None sets no limit."""
    fork: bool = False
    """Answer from a fork of the child, which is replaced in milliseconds when a call times out.
    Only for a factory that starts no threads: a fork has none of them, but all of their locks."""


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
        """
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with theirs:
            # A session of its own: Ctrl-C must not reach it, and a kill takes all it has started.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "roll.rewards.child_main", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_fileno() else subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        self._exchange(pickle.dumps(self._spec), START_TIMEOUT_S)

    def call(self, argument: Any, timeout_s: float) -> Any:
        """Run the function on `argument`; a fresh child is started where there is none.

        Raises:
            ChildRaisedError: the function raised; the child lives on.
            ChildTimeoutError, ChildDiedError: what ran the call is gone; `is_running` says
                whether the child is, too. The next call starts another.
        """
        self.start()
        # A fork's own alarm rings first; if this clock did, the whole child would have to go.
        patience_s = timeout_s + FORK_GRACE_S if self._spec.fork else timeout_s
        return self._exchange(pickle.dumps((argument, timeout_s)), patience_s)

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
                raise ChildTimeoutError(f"no answer within {timeout_s:g} s")
            kind, value = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._died() from error
        except BaseException:
            # Ctrl-C between send and receive would leave an answer that the next call takes as its.
            self.close()
            raise
        if kind == "died":
            if value == -signal.SIGALRM:
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
        if code == -signal.SIGALRM:
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
