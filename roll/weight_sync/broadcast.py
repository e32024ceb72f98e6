"""Both ends of a transfer across hosts: a collective broadcast in a group of its own.

A TCPStore on the sender's host carries the handshake (the same steps as in `host.py`) and then the
rendezvous of the group. The process's default group is not touched: the sender is usually a rank of
the trainer's, a receiver of its engine's.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import ProcessGroupGloo

from roll.core.errors import WeightSyncError
from roll.weight_sync.buckets import layout, used_bytes
from roll.weight_sync.channel import Channel
from roll.weight_sync.manifest import Manifest

_SENDER = 0
"""Rank of the sender in the group; receiver i has rank i + 1."""


class BroadcastSender:
    """The trainer's end."""

    def __init__(self, channel: Channel, manifest: Manifest, *, verify: bool) -> None:
        """Connect, announce, and return once every receiver has agreed.

        Raises:
            WeightSyncError: a receiver refused, died or did not answer in time.
        """
        self._channel = channel
        self._group: Any = None
        self._board = _Board(channel, is_sender=True)
        self._board.post("offer", {"manifest": manifest.to_json(), "verify": verify})
        try:
            self._expect_all("agreed")
        except WeightSyncError as error:
            self.stop(str(error))
            raise
        self._board.post("verdict", {"go": True})
        self._group = _join(channel, self._board.store, _SENDER)
        self._memory = _allocate(channel, manifest)

    def memory(self, index: int) -> Tensor:
        return self._memory

    def publish(self, index: int, num_bytes: int) -> None:
        _broadcast(self._group, self._memory[:num_bytes], f"bucket {index}")

    def finish(self, checksum: str | None) -> None:
        self._board.post("end", {"end": checksum})
        self._expect_all("done")

    def stop(self, reason: str) -> None:
        """Receivers before the first bucket read this; later ones notice the broken connection."""
        with contextlib.suppress(WeightSyncError):
            self._board.post("verdict", {"stop": reason})
            self._board.post("end", {"stop": reason})

    def close(self) -> None:
        """Break the connections now: an error's traceback may keep this object alive, and the
        receivers would wait for its next bucket."""
        self._group = None

    def _expect_all(self, step: str) -> None:
        failures = []
        for index in range(self._channel.num_receivers):
            answer = self._board.read(f"{step}/{index}", f"receiver {index}")
            if "failed" in answer:
                failures.append(f"receiver {index}: {answer['failed']}")
        if failures:
            raise WeightSyncError("; ".join(failures))


class BroadcastReceiver:
    """An engine's end."""

    def __init__(self, channel: Channel, index: int) -> None:
        self._channel = channel
        self._index = index
        self._group: Any = None
        self._step = "agreed"
        self._board = _Board(channel, is_sender=False)
        offer = self._board.read("offer", "the sender")
        self.manifest = Manifest.from_json(offer["manifest"])
        self.verify: bool = offer["verify"]

    def accept(self) -> None:
        """Agree to the manifest; returns when all receivers have.

        Raises:
            WeightSyncError: another receiver refused, or the sender gave up.
        """
        self._board.post(f"agreed/{self._index}", {"ok": True})
        self._step = "done"
        self._answer("verdict")
        self._group = _join(self._channel, self._board.store, self._index + 1)
        self._memory = _allocate(self._channel, self.manifest)

    def fail(self, reason: str) -> None:
        with contextlib.suppress(WeightSyncError):
            self._board.post(f"{self._step}/{self._index}", {"failed": reason})

    def incoming(self, num_buckets: int) -> Iterator[Tensor]:
        for index, bucket in enumerate(layout(self.manifest, self._channel.bucket_bytes)):
            memory = self._memory[: used_bytes(bucket)]
            _broadcast(self._group, memory, f"bucket {index}")
            yield memory

    def end(self) -> str | None:
        checksum: str | None = self._answer("end")["end"]
        return checksum

    def done(self) -> None:
        self._board.post(f"done/{self._index}", {"ok": True})

    def close(self) -> None:
        """Break the connections now, so that the others notice."""
        self._group = None

    def _answer(self, key: str) -> dict[str, Any]:
        answer = self._board.read(key, "the sender")
        if "stop" in answer:
            raise WeightSyncError(f"the sender stopped the transfer: {answer['stop']}")
        return answer


class _Board:
    """JSON notes in a TCPStore that the sender hosts."""

    def __init__(self, channel: Channel, *, is_sender: bool) -> None:
        host, _, port = channel.address.rpartition(":")
        self._timeout_s = channel.timeout_s
        try:
            self.store: Store = TCPStore(
                host,
                int(port),
                is_master=is_sender,
                timeout=timedelta(seconds=channel.timeout_s),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            doing = "listen on" if is_sender else "reach the sender at"
            raise WeightSyncError(
                f"weight transfer: could not {doing} {channel.address} within "
                f"{channel.timeout_s:g} s: {_first_line(error)}"
            ) from error

    def post(self, key: str, note: dict[str, Any]) -> None:
        try:
            self.store.set(key, json.dumps(note))
        except RuntimeError as error:
            raise WeightSyncError(
                f"weight transfer: could not post {key!r}: {_first_line(error)}; the sender's "
                "process probably died"
            ) from error

    def read(self, key: str, peer: str) -> dict[str, Any]:
        """The note under `key`, once `peer` has posted it."""
        start = time.monotonic()
        try:
            note: dict[str, Any] = json.loads(self.store.get(key))
        except RuntimeError as error:
            raise WeightSyncError(
                f"weight transfer: waited {time.monotonic() - start:.1f} s of "
                f"{self._timeout_s:g} s for {peer} ({key}): {_first_line(error)}"
            ) from error
        return note


def _join(channel: Channel, store: Store, rank: int) -> Any:
    timeout = timedelta(seconds=channel.timeout_s)
    size = channel.num_receivers + 1
    prefix = PrefixStore("group", store)
    try:
        if channel.collective == "nccl":
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = timeout
            return ProcessGroupNCCL(prefix, rank, size, options)
        return ProcessGroupGloo(prefix, rank, size, timeout)
    except RuntimeError as error:
        raise WeightSyncError(
            f"weight transfer: rank {rank} of {size} could not join the broadcast within "
            f"{channel.timeout_s:g} s: {_first_line(error)}"
        ) from error


def _allocate(channel: Channel, manifest: Manifest) -> Tensor:
    buckets = layout(manifest, channel.bucket_bytes)
    device = "cuda" if channel.collective == "nccl" else "cpu"
    size = max((used_bytes(bucket) for bucket in buckets), default=0)
    return torch.empty(size, dtype=torch.uint8, device=device)


def _broadcast(group: Any, memory: Tensor, what: str) -> None:
    try:
        group.broadcast(memory, _SENDER).wait()
    except RuntimeError as error:
        raise WeightSyncError(
            f"weight transfer: broadcast of {what} broke off: {_first_line(error)}; another "
            "process of the transfer probably died"
        ) from error


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0]
