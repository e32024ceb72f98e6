"""The senders' ends of a transfer within one host: a ring of two buckets in shared memory.

The leading sender, number 0, holds a `Link` to everybody else. All senders write into the same
buckets, each its own pieces; receivers read them in place.

Leader                         another sender              a receiver
                            <- {name}                   <- {name}
{manifest, memory} + fd     ->                          ->
                            <- {ok} or {failed: why}    <- {ok} or {failed: why}
{go} or {stop: why}         ->                          ->
{fill: k}                   ->                             k - 2 has been read by all receivers
                            <- {ok}                        its pieces of bucket k are written
{bucket: k}                                             ->
                                                        <- {ok}   read; k + 2 may overwrite it
                            <- {sum: checksum}
{end: checksum}                                         ->
                                                        <- {ok}   the new weights are in use
{end: checksum}             ->
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor

from roll.core.errors import WeightSyncError
from roll.weight_sync.abort import Abort
from roll.weight_sync.channel import Channel
from roll.weight_sync.checks import check_same
from roll.weight_sync.checksum import Checksum
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.names import LEADER, receiver_name, sender_name
from roll.weight_sync.push_plan import Bucket
from roll.weight_sync.transports.ipc import CudaBuckets
from roll.weight_sync.transports.shared_memory import HostBuckets
from roll.weight_sync.transports.socket_link import Link, Listener, connect


class SharedBuckets(Protocol):
    """Memory that all ends can reach."""

    @property
    def buckets(self) -> tuple[Tensor, Tensor]: ...

    def describe(self) -> tuple[dict[str, Any], tuple[int, ...]]: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class HostLeader:
    """The end of sender 0."""

    def __init__(
        self, channel: Channel, manifest: Manifest, size: int, abort: Abort, *, verify: bool
    ) -> None:
        """Connect, announce, and return once everybody has agreed.

        Args:
            size: bytes of the fullest bucket.

        Raises:
            WeightSyncError: somebody refused, died or did not answer in time.
        """
        if channel.kind == "cuda_ipc" and channel.num_senders > 1:
            raise WeightSyncError(
                f"CUDA IPC has one sender, not {channel.num_senders}; use shared memory"
            )
        receivers = [receiver_name(i) for i in range(channel.num_receivers)]
        senders = [sender_name(i) for i in range(1, channel.num_senders)]
        with Listener(channel.address, channel.timeout_s, abort) as listener:
            links = listener.accept_all([*receivers, *senders])
        self._receivers = [links[name] for name in receivers]
        self._senders = [links[name] for name in senders]
        self._unread: list[int] = []
        self._memory: SharedBuckets | None = None
        try:
            kind = CudaBuckets if channel.kind == "cuda_ipc" else HostBuckets
            self._memory = kind.create(size)
            description, fds = self._memory.describe()
            offer = {"manifest": manifest.to_json(), "verify": verify, "memory": description}
            for link in links.values():
                link.put(offer, fds=fds)
            _answers(links.values(), "check of the manifest")
            for link in links.values():
                link.put({"go": True})
        except WeightSyncError as error:
            self.stop(abort.reason or str(error))
            self.close()
            raise

    def memory(self, index: int) -> Tensor:
        """Where bucket `index` is to be written; waits until bucket `index - 2` has been read."""
        assert self._memory is not None
        while len(self._unread) > 1:
            self._take_read()
        for link in self._senders:
            link.put({"fill": index})
        return self._memory.buckets[index % 2]

    def publish(self, index: int, bucket: Bucket) -> None:
        """This sender's pieces of bucket `index` are written."""
        assert self._memory is not None
        self._memory.sync()
        _answers(self._senders, f"writing of bucket {index}")
        for link in self._receivers:
            link.put({"bucket": index})
        self._unread.append(index)

    def finish(self, checksum: Checksum | None) -> str | None:
        """Everything is sent; returns when all receivers use the new weights.

        Returns:
            The checksum of what all senders sent.
        """
        while self._unread:
            self._take_read()
        for answer in _answers(self._senders, "end of its parts"):
            if checksum is not None:
                checksum.merge(answer["sum"])
        total = checksum.hexdigest() if checksum else None
        for link in self._receivers:
            link.put({"end": total})
        _answers(self._receivers, "use of the new weights")
        for link in self._senders:
            link.put({"end": total})
        return total

    def stop(self, reason: str) -> None:
        """Tell the others that are still there to give up."""
        for link in [*self._receivers, *self._senders]:
            with contextlib.suppress(WeightSyncError):
                link.put({"stop": reason})

    def close(self) -> None:
        for link in [*self._receivers, *self._senders]:
            link.close()
        if self._memory is not None:
            self._memory.close()

    def _take_read(self) -> None:
        _answers(self._receivers, f"reading of bucket {self._unread.pop(0)}")


class HostHelper:
    """The end of any other sender: it writes when the leader says so."""

    def __init__(self, channel: Channel, manifest: Manifest, sender: int, abort: Abort) -> None:
        """Connect, and return once everybody has agreed.

        Raises:
            WeightSyncError: somebody refused or died, or the leader announced something else.
        """
        self._link = connect(channel.address, sender_name(sender), channel.timeout_s, abort)
        self._link.peer = LEADER
        self._memory: HostBuckets | None = None
        try:
            offer, fds = read_offer(self._link)
            self._memory = HostBuckets.open(fds[0], offer["memory"]["num_bytes"])
            check_same(manifest, Manifest.from_json(offer["manifest"]), sender)
            self._link.put({"ok": True})
            self._next("go")
        except WeightSyncError as error:
            self.stop(str(error))
            self.close()
            raise

    def memory(self, index: int) -> Tensor:
        """Where this sender's pieces of bucket `index` are to be written, as soon as they may."""
        assert self._memory is not None
        self._next("fill")
        return self._memory.buckets[index % 2]

    def publish(self, index: int, bucket: Bucket) -> None:
        """They are written."""
        self._link.put({"ok": True})

    def finish(self, checksum: Checksum | None) -> str | None:
        """As `HostLeader.finish`."""
        self._link.put({"sum": checksum.hexdigest() if checksum else None})
        total: str | None = self._next("end")
        return total

    def stop(self, reason: str) -> None:
        with contextlib.suppress(WeightSyncError):
            self._link.put({"failed": reason})

    def close(self) -> None:
        self._link.close()
        if self._memory is not None:
            self._memory.close()

    def _next(self, key: str) -> Any:
        return next_message(self._link, key)


def read_offer(link: Link) -> tuple[dict[str, Any], list[int]]:
    """The leader's first message, and the descriptors that came with it.

    Raises:
        WeightSyncError: it says stop, or does not come.
    """
    message, fds = link.get("handshake", max_fds=1)
    _heed_stop(message)
    return message, fds


def next_message(link: Link, key: str) -> Any:
    """The content of the leader's next message.

    Raises:
        WeightSyncError: it says stop, or does not come.
    """
    message, _ = link.get(f"next message ({key})")
    _heed_stop(message)
    return message[key]


def _heed_stop(message: dict[str, Any]) -> None:
    if "stop" in message:
        raise WeightSyncError(f"the sender stopped the transfer: {message['stop']}")


def _answers(links: Iterable[Link], doing: str) -> list[dict[str, Any]]:
    """One answer of each; all are read, so that the error names every refusal."""
    answers = []
    failures = []
    for link in links:
        answer, _ = link.get(doing)
        answers.append(answer)
        if "failed" in answer:
            failures.append(f"{link.peer}: {answer['failed']}")
    if failures:
        raise WeightSyncError("; ".join(failures))
    return answers
