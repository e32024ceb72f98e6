"""Orderly end of a run: Ctrl-C, SIGTERM, an exception and a normal end all run the same cleanups.

Example:
    with orderly_end() as cleanups:
        resources = cleanups.enter_context(ResourceManager(...))
        ...
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from types import FrameType
from typing import Any, NoReturn

from roll.core.errors import StoppedEarlyError

LOGGER = logging.getLogger(__name__)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopWish:
    """Wish that the run ends behind the step that is under way."""

    def __init__(self, at: datetime | None = None) -> None:
        """Wish for no end before this moment; None: not before somebody asks."""
        self._at = None if at is None else at.astimezone()
        self._signum: int | None = None
        self.step: int | None = None
        """Number of the step that is under way; None before the first."""

    @property
    def reason(self) -> str | None:
        """Why the run is to end; None while it is not."""
        if self._signum is not None:
            return signal.Signals(self._signum).name
        if self._at is not None and datetime.now().astimezone() >= self._at:
            return f"stop_at {self._at:%Y-%m-%d %H:%M:%S %z}"
        return None

    @contextmanager
    def asked_by(self, signum: signal.Signals) -> Iterator[None]:
        """Let the first such signal inside the block ask for the end behind the step; a second one
        does what the signal does outside.

        If the block fails after the first signal, it ends by `Terminated`: a batch system has often
        sent the signal to Ray and the workers, too. Outside the main thread, no signal is caught.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.getsignal(signum)

        def ask(number: int, frame: FrameType | None) -> None:
            self._signum = number
            signal.signal(number, previous)
            step = "its first step" if self.step is None else f"step {self.step}"
            LOGGER.warning(
                "%s: the run ends behind %s; a second one ends it now", signum.name, step
            )

        signal.signal(signum, ask)
        try:
            yield
        except Exception as error:
            if self._signum is not None and not isinstance(error, StoppedEarlyError):
                raise Terminated(self._signum) from error
            raise
        finally:
            if self._signum is None:
                signal.signal(signum, previous)


class Terminated(KeyboardInterrupt):
    """A signal has asked the run to end. `signum` is its number; the exit code is 128 + signum."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"ended by {signal.Signals(signum).name}")
        self.signum = signum


@contextmanager
def orderly_end() -> Iterator[ExitStack]:
    """Turn SIGINT, SIGTERM and SIGHUP into `Terminated` inside the block. At its end, run the
    cleanups of the yielded stack, each once.

    While cleanups run, further signals are logged and otherwise ignored: each cleanup has its own
    time limit, and an interrupted cleanup would leave processes behind. A SIGHUP that is ignored
    (`nohup`) stays so. Outside the main thread, signal handlers are not changed.
    """
    received: list[int] = []

    def end_run(signum: int, frame: FrameType | None) -> NoReturn:
        received.append(signum)
        raise Terminated(signum)

    previous = _install(end_run)
    try:
        with ExitStack() as cleanups:
            try:
                yield cleanups
            except KeyboardInterrupt as interrupt:
                # Waits inside Ray replace the handler's exception by a plain KeyboardInterrupt.
                if received and not isinstance(interrupt, Terminated):
                    raise Terminated(received[0]) from None
                raise
            finally:
                _install(_note_signal)
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextmanager
def exit_at_hangup() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into `SystemExit` inside the block, for a command that treats SIGINT,
    a KeyboardInterrupt, as part of a conversation."""

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)

    previous = _install(leave, (signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _install(handler: Any, signals: Sequence[signal.Signals] = SIGNALS) -> dict[int, Any]:
    """Install a handler of signals; return the old ones. Outside the main thread, do nothing.

    A SIGHUP that is ignored stays so: `nohup` lets a run outlive its terminal.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    taken = [
        signum
        for signum in signals
        if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN
    ]
    return {signum: signal.signal(signum, handler) for signum in taken}


def _note_signal(signum: int, frame: FrameType | None) -> None:
    LOGGER.warning("%s: already ending, workers are being stopped", signal.Signals(signum).name)
