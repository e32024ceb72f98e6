"""The notice board of a broadcast, in a TCPStore that the leading sender hosts."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from roll.core.errors import WeightSyncError
from roll.platform import rendezvous
from roll.weight_sync.channel import Channel

SLICE_S = 0.25
"""Time between two checks for a stopped transfer, during waits for other events, in seconds."""
PAUSE_S = (0.0001, 0.005)
"""Shortest and longest time between two checks for something that will come soon, in seconds."""


class StoreBoard:
    """Notice board whose notes are entries of a TCPStore that the leading sender hosts.

    Args:
        name: name of this process on the board.
        is_host: True in the leading sender, which then serves the store.
    """

    def __init__(self, channel: Channel, name: str, *, is_host: bool) -> None:
        self._timeout_s = channel.timeout_s
        self._name = name
        self._is_host = is_host
        self.store = open_store(channel, is_host=is_host)

    def post(self, key: str, note: dict[str, Any]) -> None:
        try:
            self.store.set(key, json.dumps(note))
        except RuntimeError as error:
            raise WeightSyncError(
                f"weight transfer: could not post {key!r}: {first_line(error)}; the sender's "
                "process probably died"
            ) from error

    def read(self, key: str, peer: str) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout_s
        pause_s, longest_s = PAUSE_S
        while not self._has([key]):
            self.raise_if_stopped()
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"weight transfer: waited {self._timeout_s:g} s for {peer} ({key}); it may "
                    "hang, or have died"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, longest_s)
        note: dict[str, Any] = json.loads(self.store.get(key))
        return note

    def stop(self, reason: str) -> None:
        if not self._has(["stop"]):  # the first reason is the cause
            self.post("stop", {"stop": reason})
        self.post(f"left/{self._name}", {"ok": True})

    def give_up(self, reason: str) -> None:
        """Stop the transfer, from any thread; a wait in this process ends too. Ignore errors."""
        with contextlib.suppress(WeightSyncError):
            self.stop(reason)

    def raise_if_stopped(self) -> None:
        """Raise an error if the transfer was stopped; first post that this process has left.

        Raises:
            WeightSyncError: a process stopped the transfer, or the board is gone.
        """
        if self._has(["stop"]):
            reason = json.loads(self.store.get("stop"))["stop"]
            self.post(f"left/{self._name}", {"ok": True})
            raise WeightSyncError(f"the transfer was stopped: {reason}")

    def linger(self, others: Sequence[str]) -> None:
        """Keep the board, after a stop, until all `others` have read why; done in the background.

        Only the host does this. A process that came after the board had gone would wait for a
        sender until its time limit.
        """
        if not self._is_host:
            return
        keys = [f"left/{name}" for name in others]
        deadline = time.monotonic() + self._timeout_s

        def hold() -> None:
            with contextlib.suppress(WeightSyncError):
                while not self._has(keys) and time.monotonic() < deadline:
                    time.sleep(SLICE_S)

        with contextlib.suppress(WeightSyncError):
            if self._has(["stop"]) and not self._has(keys):
                threading.Thread(target=hold, name="roll-late-readers", daemon=True).start()

    def _has(self, keys: list[str]) -> bool:
        """Return True if all keys are posted; raise WeightSyncError if the store is gone."""
        try:
            return bool(self.store.check(keys))
        except RuntimeError as error:
            raise WeightSyncError(
                f"weight transfer: the notice board is gone: {first_line(error)}; the sender's "
                "process probably died"
            ) from error


def open_store(channel: Channel, *, is_host: bool) -> Store:
    """Serve the store of the channel's address (`is_host`), or connect to it.

    Raises:
        WeightSyncError: the address is taken, or nobody serves the store there in time.
    """
    host, _, port = channel.address.rpartition(":")
    try:
        return rendezvous.open_store(
            host,
            int(port),
            serves=is_host,
            timeout=timedelta(seconds=channel.timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        doing = "listen on" if is_host else "reach the sender at"
        raise WeightSyncError(
            f"weight transfer: could not {doing} {channel.address} within "
            f"{channel.timeout_s:g} s: {first_line(error)}"
        ) from error


def first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0]
