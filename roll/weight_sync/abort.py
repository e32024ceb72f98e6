"""`Abort`: ends a transfer at the sender, from another thread, whatever it waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable

from roll.core.errors import WeightSyncError
from roll.weight_sync.channel import Channel


class Abort:
    """Of one transfer; it may come before the transfer begins, which then ends at once."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why the transfer is given up, from then on."""
        self._lock = threading.Lock()
        self._wake: list[Callable[[str], None]] = []

    def give_up(self, reason: str) -> None:
        """End the transfer; a second reason is ignored."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
        for wake in self._wake:
            wake(reason)

    def when_given_up(self, wake: Callable[[str], None]) -> None:
        """Call `wake` with the reason, in the thread of `give_up`, or now if it has been called."""
        with self._lock:
            self._wake.append(wake)
            reason = self.reason
        if reason is not None:
            wake(reason)

    def check(self) -> None:
        """
        Raises:
            WeightSyncError: the transfer is given up.
        """
        if self.reason is not None:
            raise WeightSyncError(f"the transfer was given up: {self.reason}")


class PushAborts:
    """The `Abort` of the newest push of one sender, whoever asks for it first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: tuple[str, Abort] | None = None

    def of(self, channel: Channel) -> Abort:
        """That of the push through `channel`."""
        with self._lock:
            if self._newest is None or self._newest[0] != channel.address:
                self._newest = channel.address, Abort()
            return self._newest[1]
