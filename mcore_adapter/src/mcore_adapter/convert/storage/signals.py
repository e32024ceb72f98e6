"""Handling of signals that end a process, so that no work is left half done."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that by default end a Python process without an exception."""


class Stopped(BaseException):
    """Exception raised on SIGTERM or SIGHUP, as KeyboardInterrupt is raised on Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def signals_raised() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise `Stopped` within the block instead of ending the process.

    A signal that is ignored (nohup) or handled by the caller stays so. Outside the main thread this
    function has no effect, because Python handles signals only in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    try:
        for number in taken:
            signal.signal(number, stop)
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def cleaned_up() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise `Stopped` within the block, and end the process after it.

    The block can thus clean up. The process ends as it would have ended without the block. For
    ignored signals and other threads see `signals_raised`.
    """
    was = {number: signal.getsignal(number) for number in _ENDING}
    try:
        with signals_raised():
            yield
    except Stopped as stopped:
        if was[signal.Signals(stopped.number)] is signal.SIG_DFL:
            os.kill(os.getpid(), stopped.number)
        raise


@contextmanager
def signals_delayed() -> Iterator[None]:
    """Delay SIGINT, SIGTERM and SIGHUP until the block has ended, if they have a handler in Python.

    SIGTERM and SIGHUP have one within `signals_raised`; without one they end the process at once.
    If several signals came, only the first one is raised. Outside the main thread this function
    has no effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = [n for n in (signal.SIGINT, *_ENDING) if callable(signal.getsignal(n))]
    was = {n: signal.signal(n, lambda number, _: came.append(number)) for n in numbers}
    try:
        yield
    finally:
        for taken, handler in was.items():
            signal.signal(taken, handler)
        for number in came[:1]:
            signal.raise_signal(number)


def leave_to_parent() -> None:
    """Let the parent alone react to Ctrl-C and to a closed terminal; called in a worker process.

    A terminal sends these signals to all its processes. The parent ends its workers itself, so this
    process ignores SIGINT and SIGHUP and ends on SIGTERM. On Linux, the kernel kills it when the
    parent is killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        # If the parent is killed, the kernel kills this process, too.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
