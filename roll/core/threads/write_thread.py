"""`WriteThread`: a write in two parts, in a thread beside the work of a process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum


class Written(IntEnum):
    """Progress of a write; a larger value is further."""

    NOTHING = 0
    """The first part is under way."""
    OWN = 1
    """The first part has ended; the second waits for `go_on`."""
    ALL = 2
    """Both parts have ended."""


class WriteThread:
    """A write whose second part needs the word of somebody who knows that others are ready, too."""

    def __init__(
        self, first: Callable[[], None], second: Callable[[], None] | None, name: str
    ) -> None:
        """Begin the first part.

        Args:
            second: second part; None: there is nothing to do in it.
            name: name of the thread, for debuggers.
        """
        self._parts = first, second
        self._go_on = threading.Event()
        self._written = Written.NOTHING
        self._error: Exception | None = None
        # A daemon, so that a disk that hangs does not keep the process alive.
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def go_on(self) -> None:
        """Let the second part begin. Never waits."""
        self._go_on.set()

    def look(self) -> Written:
        """Return how far the write is, without waiting; raise the error that has ended it."""
        if self._error is not None:
            raise self._error
        return self._written

    def _work(self) -> None:
        first, second = self._parts
        try:
            first()
            self._written = Written.OWN
            self._go_on.wait()
            if second is not None:
                second()
            self._written = Written.ALL
        except Exception as error:  # noqa: BLE001 - `look` raises it
            self._error = error
        finally:
            # What was written may be as large as the model.
            del self._parts, first, second
