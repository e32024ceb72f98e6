"""The senders' ends of a transfer within one host: a ring of two buckets in shared memory.

The leading sender, number 0, holds a `Link` to each other process. All senders write into the same
buckets, each its own pieces; receivers read the buckets in place. The messages, in order; `->` goes
from the leader and `<-` to it:

Leader                         another sender              a receiver
                            <- {name}                   <- {name}
{manifest, memory} + fd     ->                          ->
                            <- {ok} or {failed: why}    <- {ok} or {failed: why}
{go} or {stop: why}         ->                          ->
{fill: k}                   ->                             all receivers have read bucket k - 2
                            <- {ok}                        its pieces of bucket k are written
{bucket: k}                                             ->
                                                        <- {ok}   bucket k is read; k + 2 may
                                                                  overwrite it
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

from roll.core.errors import WeightSyncError, failure
from roll.weight_sync.abort import Abort
from roll.weight_sync.channel import Channel
from roll.weight_sync.checks import check_same
from roll.weight_sync.checksum import Checksum
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.names import receiver_name, sender_name
from roll.weight_sync.push_plan import Bucket
from roll.weight_sync.transports.ipc import CudaBuckets
from roll.weight_sync.transports.shared_memory import HostBuckets
from roll.weight_sync.transports.socket_link import Link, Listener, connect


class SharedBuckets(Protocol):
    """Memory of two buckets that all ends of a transfer can open."""

    @property
    def buckets(self) -> tuple[Tensor, Tensor]:
        """Memory of the two buckets; bucket k of a push is written into number `k % 2`."""
        ...

    def describe(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Return what another process needs to open the memory: a message and file descriptors.

        The message is plain JSON. The descriptors are sent beside it; memory of a GPU has none.
        """
        ...

    def sync(self) -> None:
        """Wait until other processes can read what this process has written."""
        ...

    def close(self) -> None:
        """Give up this process's hold on the memory; other processes keep theirs."""
        ...


class HostLeader:
    """The leading sender's end of a transfer within one host."""

    groups_made = 0

    def __init__(
        self, channel: Channel, manifest: Manifest, size: int, abort: Abort, *, verify: bool
    ) -> None:
        """Connect and agree as `SenderEnd` says."""
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
        except Exception as error:
            self.stop(abort.reason or failure(error))
            self.close()
            raise

    def memory(self, index: int) -> Tensor:
        """Return the memory of bucket `index`, once all receivers have read bucket `index - 2`."""
        assert self._memory is not None
        while len(self._unread) > 1:
            self._take_read()
        for link in self._senders:
            link.put({"fill": index})
        return self._memory.buckets[index % 2]

    def publish(self, index: int, bucket: Bucket) -> None:
        """Wait until all senders have written bucket `index`, then tell the receivers."""
        assert self._memory is not None
        self._memory.sync()
        _answers(self._senders, f"writing of bucket {index}")
        for link in self._receivers:
            link.put({"bucket": index})
        self._unread.append(index)

    def finish(self, checksum: Checksum | None) -> str | None:
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
        for link in [*self._receivers, *self._senders]:
            with contextlib.suppress(WeightSyncError):
                link.put({"stop": reason})

    def close(self) -> None:
        """Close the connections to all other processes, and give up the buckets."""
        for link in [*self._receivers, *self._senders]:
            link.close()
        if self._memory is not None:
            self._memory.close()

    def _take_read(self) -> None:
        """Wait until all receivers have read the oldest unread bucket."""
        _answers(self._receivers, f"reading of bucket {self._unread.pop(0)}")


class HostHelper:
    """The end of a sender that does not lead: it writes when the leader tells it to."""

    groups_made = 0

    def __init__(self, channel: Channel, manifest: Manifest, sender: int, abort: Abort) -> None:
        """Connect and agree as `SenderEnd` says; WeightSyncError if the manifests differ."""
        self._link = connect(channel.address, sender_name(sender), channel.timeout_s, abort)
        self._memory: HostBuckets | None = None
        try:
            offer, fds = read_offer(self._link)
            self._memory = HostBuckets.open(fds[0], offer["memory"]["num_bytes"])
            check_same(manifest, Manifest.from_json(offer["manifest"]), sender)
            self._link.put({"ok": True})
            next_message(self._link, "go")
        except Exception as error:
            self.stop(failure(error))
            self.close()
            raise

    def memory(self, index: int) -> Tensor:
        """Return the memory of bucket `index`, once the leader says that it may be written."""
        assert self._memory is not None
        next_message(self._link, "fill")
        return self._memory.buckets[index % 2]

    def publish(self, index: int, bucket: Bucket) -> None:
        """Tell the leader that this sender's pieces of bucket `index` are written."""
        self._link.put({"ok": True})

    def finish(self, checksum: Checksum | None) -> str | None:
        """Send this sender's checksum to the leader; wait for that of all senders, sent at the end
        of the push, and return it. None if `checksum` is None."""
        self._link.put({"sum": checksum.hexdigest() if checksum else None})
        total: str | None = next_message(self._link, "end")
        return total

    def stop(self, reason: str) -> None:
        with contextlib.suppress(WeightSyncError):
            self._link.put({"failed": reason})

    def close(self) -> None:
        """Close the connection to the leader, and give up the buckets."""
        self._link.close()
        if self._memory is not None:
            self._memory.close()


def read_offer(link: Link) -> tuple[dict[str, Any], list[int]]:
    """Wait for the leader's first message; return it and the file descriptors that came with it.

    Raises:
        WeightSyncError: the message says stop, or does not come.
    """
    message, fds = link.get("handshake", max_fds=1)
    _raise_if_stopped(message)
    return message, fds


def next_message(link: Link, key: str) -> Any:
    """Wait for the leader's next message and return its value under `key`.

    Args:
        key: key of the only message that may come next, apart from stop.

    Raises:
        WeightSyncError: the message says stop, or does not come.
    """
    message, _ = link.get(f"next message ({key})")
    _raise_if_stopped(message)
    return message[key]


def _raise_if_stopped(message: dict[str, Any]) -> None:
    """Raise WeightSyncError if the leader's message tells this process to give up."""
    if "stop" in message:
        raise WeightSyncError(f"the sender stopped the transfer: {message['stop']}")


def _answers(links: Iterable[Link], doing: str) -> list[dict[str, Any]]:
    """Read one answer from each link, and return the answers in order.

    All answers are read before an error is raised, so that the error names every refusal.

    Args:
        doing: activity that the answers confirm, a noun such as `reading of bucket 3`, for the
            message.

    Raises:
        WeightSyncError: at least one process refused, or an answer did not come.
    """
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
