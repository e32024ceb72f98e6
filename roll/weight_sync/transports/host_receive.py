"""A receiver's end of a transfer within one host; `host_send.py` lists the messages."""

from __future__ import annotations

import contextlib
import os

from roll.core.errors import WeightSyncError
from roll.weight_sync.channel import Channel
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.names import receiver_name
from roll.weight_sync.receive_buffer import ReceiveBuffer
from roll.weight_sync.transports.host_send import next_message, read_offer
from roll.weight_sync.transports.ipc import open_cuda_buckets
from roll.weight_sync.transports.shared_memory import shared_buffers
from roll.weight_sync.transports.socket_link import connect


class HostReceiver:
    """A receiver's end of a transfer within one host, in one rank of an engine.

    Args:
        index: number of this receiver, below `channel.num_receivers`.
    """

    def __init__(self, channel: Channel, index: int) -> None:
        self._link = connect(channel.address, receiver_name(index), channel.timeout_s)
        self._slots: tuple[ReceiveBuffer, ReceiveBuffer] | None = None
        self._fds: list[int] = []
        try:
            offer, self._fds = read_offer(self._link)
            self.manifest = Manifest.from_json(offer["manifest"])
            self.verify: bool = offer["verify"]
            self._description = offer["memory"]
        except BaseException:
            self.close()
            raise

    def accept(self) -> None:
        """Open the buckets, then agree as `ReceiverEnd.accept` does."""
        if self._description["kind"] == "cuda":
            self._slots = open_cuda_buckets(self._description)
        else:
            self._slots = shared_buffers(self._fds[0], self._description["num_bytes"])
        self._link.put({"ok": True})
        next_message(self._link, "go")

    def fail(self, reason: str) -> None:
        with contextlib.suppress(WeightSyncError):
            self._link.put({"failed": reason})

    def take(self, index: int) -> ReceiveBuffer:
        assert self._slots is not None
        next_message(self._link, "bucket")
        return self._slots[index % 2]

    def give_back(self, index: int) -> None:
        assert self._slots is not None
        self._slots[index % 2].recycle()
        with contextlib.suppress(WeightSyncError):  # gone: its last message said why
            self._link.put({"ok": True})

    def end(self) -> str | None:
        checksum: str | None = next_message(self._link, "end")
        return checksum

    def done(self) -> None:
        self._link.put({"ok": True})

    def close(self) -> None:
        """Close the connection and the file descriptors, and give up the buckets.

        Tensors that the engine still uses keep their memory. A second call does nothing.
        """
        self._link.close()
        self._slots = None
        while self._fds:
            os.close(self._fds.pop())
