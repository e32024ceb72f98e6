"""Signals that end a process leave nothing half done behind."""

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


class Stopped(BaseException):
    """SIGTERM or SIGHUP has come; what KeyboardInterrupt is to Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def raising() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `Stopped` where they would end the process at once.

    Where they are ignored (nohup), or handled by whoever calls, that stays. Of no effect in other
    threads than the main one, where Python takes no signals.
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
def tidied() -> Iterator[None]:
    """As `raising`; then the signal ends the process as it would have."""
    was = {number: signal.getsignal(number) for number in _ENDING}
    try:
        with raising():
            yield
    except Stopped as stopped:
        if was[signal.Signals(stopped.number)] is signal.SIG_DFL:
            os.kill(os.getpid(), stopped.number)
        raise


@contextmanager
def held_back() -> Iterator[None]:
    """Signals that raise an exception do so only after the block, which is done as a whole."""
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
    """In a process that another one started and will end: what ends a terminal's processes reaches
    all of them, and only the first one may act."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        # A parent that is killed takes this process with it, whatever it is just doing.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
