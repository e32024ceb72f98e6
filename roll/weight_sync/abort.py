"""`Abort`: ends a transfer from another thread of a sender, even while the transfer waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

from roll.core.errors import WeightSyncError
from roll.weight_sync.channel import Channel


class Abort:
    """Switch that ends one transfer.

    It may be set before the transfer begins; the transfer then ends as soon as it begins.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why the transfer was given up; None until then."""
        self._lock = threading.Lock()
        self._wake: list[Callable[[str], None]] = []

    def give_up(self, reason: str) -> None:
        """End the transfer; later calls are ignored, so the first reason is kept."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
        for wake in self._wake:
            wake(reason)

    def when_given_up(self, wake: Callable[[str], None]) -> None:
        """Have `give_up` call `wake` with the reason; call `wake` now if it was called before."""
        with self._lock:
            self._wake.append(wake)
            reason = self.reason
        if reason is not None:
            wake(reason)

    def check(self) -> None:
        """Raise an error if the transfer was given up.

        Raises:
            WeightSyncError: the transfer was given up.
        """
        if self.reason is not None:
            raise WeightSyncError(f"the transfer was given up: {self.reason}")


MOST_PUSHES = 8
"""Number of pushes whose `Abort` a sender keeps. Only the newest one can run; a call that gives up
an older one may come late."""


class PushAborts:
    """Holder of the `Abort` of each of one sender's newest pushes.

    The call that sends and the call that gives up share this `Abort`; either may come first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_address: dict[str, Abort] = {}

    def of(self, channel: Channel) -> Abort:
        """Return the `Abort` of the push through `channel`; make one if the channel is new."""
        with self._lock:
            if channel.address not in self._by_address:
                self._by_address[channel.address] = Abort()
                if len(self._by_address) > MOST_PUSHES:
                    self._by_address.pop(next(iter(self._by_address)))
            return self._by_address[channel.address]
