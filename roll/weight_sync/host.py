"""Both ends of a transfer within one host: a ring of two buckets with a handshake over `Link`s.

Sender                         Receiver
                            <- {index}
{manifest, memory} + fd     ->
                            <- {ok} or {failed: reason}
{go} or {stop: reason}      ->
{bucket: k}                 ->                   written before; at most two are unread
                            <- {ok}              read; bucket k + 2 may overwrite it
{end: checksum}             ->
                            <- {ok}              the new weights are in use
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from roll.core.errors import WeightSyncError
from roll.weight_sync.channel import Channel
from roll.weight_sync.ipc import CudaBuckets, open_cuda_buckets
from roll.weight_sync.link import Listener, connect
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.shared_memory import HostBuckets, open_host_buckets


class Buckets(Protocol):
    """Memory that both ends can reach."""

    @property
    def buckets(self) -> tuple[Tensor, Tensor]: ...

    def describe(self) -> tuple[dict[str, Any], tuple[int, ...]]: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class HostSender:
    """The trainer's end."""

    def __init__(self, channel: Channel, manifest: Manifest, *, verify: bool) -> None:
        """Connect, announce, and return once every receiver has agreed.

        Raises:
            WeightSyncError: a receiver refused, died or did not answer in time.
        """
        self._memory: Buckets | None = None
        self._unread: list[int] = []
        with Listener(channel.address, channel.timeout_s) as listener:
            self._links = listener.accept_all(channel.num_receivers)
        try:
            size = max(min(channel.bucket_bytes, _padded(manifest)), 1)
            kind = CudaBuckets if channel.kind == "cuda_ipc" else HostBuckets
            self._memory = kind.create(size)
            description, fds = self._memory.describe()
            offer = {"manifest": manifest.to_json(), "verify": verify, "memory": description}
            for link in self._links:
                link.put(offer, fds=fds)
            self._expect_all("check of the manifest")
            for link in self._links:
                link.put({"go": True})
        except WeightSyncError as error:
            self.stop(str(error))
            self.close()
            raise

    def memory(self, index: int) -> Tensor:
        """Where bucket `index` is to be written; waits until bucket `index - 2` has been read."""
        assert self._memory is not None
        while len(self._unread) > 1:
            self._take_read()
        return self._memory.buckets[index % 2]

    def publish(self, index: int, num_bytes: int) -> None:
        """Bucket `index` is written."""
        assert self._memory is not None
        self._memory.sync()
        for link in self._links:
            link.put({"bucket": index})
        self._unread.append(index)

    def finish(self, checksum: str | None) -> None:
        """Everything is sent; returns when all receivers use the new weights."""
        while self._unread:
            self._take_read()
        for link in self._links:
            link.put({"end": checksum})
        self._expect_all("use of the new weights")

    def stop(self, reason: str) -> None:
        """Tell the receivers that are still there to give up."""
        for link in self._links:
            with contextlib.suppress(WeightSyncError):
                link.put({"stop": reason})

    def close(self) -> None:
        for link in self._links:
            link.close()
        if self._memory is not None:
            self._memory.close()

    def _take_read(self) -> None:
        self._expect_all(f"reading of bucket {self._unread.pop(0)}")

    def _expect_all(self, doing: str) -> None:
        """One answer of each receiver; all are read, so that the error names every refusal."""
        failures = []
        for link in self._links:
            answer, _ = link.get(doing)
            if "failed" in answer:
                failures.append(f"{link.peer}: {answer['failed']}")
        if failures:
            raise WeightSyncError("; ".join(failures))


class HostReceiver:
    """An engine's end."""

    def __init__(self, channel: Channel, index: int) -> None:
        self._link = connect(channel.address, index, channel.timeout_s)
        self._buckets: tuple[Tensor, Tensor] | None = None
        try:
            offer, fds = self._link.get("handshake", max_fds=1)
            self.manifest = Manifest.from_json(offer["manifest"])
            self.verify: bool = offer["verify"]
            self._description = offer["memory"]
            self._fds = fds
        except BaseException:
            self._link.close()
            raise

    def accept(self) -> None:
        """Agree to the manifest; returns when all receivers have.

        Raises:
            WeightSyncError: another receiver refused, or the sender gave up.
        """
        if self._description["kind"] == "cuda":
            self._buckets = open_cuda_buckets(self._description)
        else:
            fds, self._fds = self._fds, []
            self._buckets = open_host_buckets(self._description, fds)
        self._link.put({"ok": True})
        self._next("go")

    def fail(self, reason: str) -> None:
        """Tell the sender why this side gives up; it may be gone already."""
        with contextlib.suppress(WeightSyncError):
            self._link.put({"failed": reason})

    def incoming(self, num_buckets: int) -> Iterator[Tensor]:
        """Each bucket's memory; asking for the next one says that it has been read."""
        assert self._buckets is not None
        for index in range(num_buckets):
            self._next("bucket")
            memory = self._buckets[index % 2]
            yield memory
            if memory.is_cuda:
                torch.cuda.current_stream().synchronize()
            with contextlib.suppress(WeightSyncError):  # a sender that is gone has said why before
                self._link.put({"ok": True})

    def end(self) -> str | None:
        """The sender's checksum, if it made one."""
        checksum: str | None = self._next("end")
        return checksum

    def done(self) -> None:
        """The new weights are in use."""
        self._link.put({"ok": True})

    def close(self) -> None:
        self._link.close()
        self._buckets = None
        if self._fds:  # never opened: refused before
            open_host_buckets(self._description, self._fds)

    def _next(self, key: str) -> Any:
        message, _ = self._link.get(f"next message ({key})")
        if "stop" in message:
            raise WeightSyncError(f"the sender stopped the transfer: {message['stop']}")
        return message[key]


def _padded(manifest: Manifest) -> int:
    """Enough for all tensors, alignment included: a small model needs no full bucket."""
    return manifest.num_bytes + 16 * len(manifest.tensors)
