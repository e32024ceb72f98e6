"""Tensors that lie in a bucket keep their bytes for as long as anybody refers to them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from roll.weight_sync.manifest import Manifest, TensorMeta
from roll.weight_sync.push_plan import layout
from roll.weight_sync.receive_buffer import PrivateBuffer, ReceiveBuffer
from roll.weight_sync.transports.shared_memory import HostBuckets, shared_buffers
from roll.weight_sync.unpack import unpack

SIZE = 8 * mmap.PAGESIZE
Writer = Callable[[int], None]


@pytest.fixture(params=["shared", "private"])
def slot(request: pytest.FixtureRequest) -> Iterator[tuple[ReceiveBuffer, Writer]]:
    """A receiver's slot and how the next bucket gets into it."""
    if request.param == "private":
        private = PrivateBuffer(SIZE)
        yield private, lambda value: fill(private.memory, value)
        return
    buckets = HostBuckets.create(SIZE)
    first, _ = shared_buffers(os.dup(buckets.fd), SIZE)
    yield first, lambda value: fill(buckets.buckets[0], value)
    buckets.close()


def fill(memory: Tensor, value: int) -> None:
    memory.fill_(value)


def meta(num_bytes: int) -> TensorMeta:
    return TensorMeta("w", (num_bytes,), "uint8")


def test_a_tensor_kept_over_the_next_bucket_keeps_its_bytes(
    slot: tuple[ReceiveBuffer, Writer],
) -> None:
    receiver, write = slot
    write(1)
    kept = receiver.view(64, meta(3 * mmap.PAGESIZE))
    dropped = receiver.view(5 * mmap.PAGESIZE, meta(64))
    assert receiver.in_use()
    del dropped
    receiver.recycle()
    assert not receiver.in_use()
    write(2)
    assert (kept == 1).all()
    assert (receiver.view(64, meta(64)) == 2).all()


def test_a_view_of_a_tensor_counts_as_the_tensor(slot: tuple[ReceiveBuffer, Writer]) -> None:
    receiver, write = slot
    write(1)
    part = receiver.view(0, meta(640)).reshape(10, 64)[3:5].T
    assert receiver.in_use()
    receiver.recycle()
    write(2)
    assert (part == 1).all()


def test_a_slot_without_tensors_in_use_shows_the_next_bucket(
    slot: tuple[ReceiveBuffer, Writer],
) -> None:
    receiver, write = slot
    for value in range(5):
        write(value)
        assert (receiver.view(128, meta(500)) == value).all()
        assert not receiver.in_use()
        receiver.recycle()


class Feed:
    """Buckets that are overwritten as soon as they are given back; counts what is out at once."""

    def __init__(self, contents: list[Tensor]) -> None:
        self.contents = contents
        self.slots = (PrivateBuffer(SIZE), PrivateBuffer(SIZE))
        self.out: set[int] = set()
        self.most_out = 0

    def take(self, index: int) -> ReceiveBuffer:
        content = self.contents[index]
        self.slots[index % 2].memory[: len(content)] = content
        self.out.add(index)
        self.most_out = max(self.most_out, len(self.out))
        return self.slots[index % 2]

    def give_back(self, index: int) -> None:
        self.out.remove(index)
        self.slots[index % 2].recycle()
        self.slots[index % 2].memory.fill_(255)


def test_a_consumer_that_lets_go_never_makes_a_bucket_wait() -> None:
    manifest = Manifest(tuple(TensorMeta(f"m{i}.w", (1000,), "uint8") for i in range(40)))
    buckets = layout(manifest, 4096)
    contents = []
    for bucket in buckets:
        content = torch.zeros(4096, dtype=torch.uint8)
        for piece in bucket:
            content[piece.offset : piece.offset + piece.num_bytes] = piece.tensor
        contents.append(content)
    feed = Feed(contents)
    mappings = {id(slot.memory) for slot in feed.slots}
    for position, (name, tensor) in enumerate(
        unpack(manifest, buckets, feed, lambda meta: None, None)
    ):
        assert name == f"m{position}.w"
        assert (tensor == position).all()
        # No slot has to be replaced, which is what saving a tensor costs.
        assert {id(slot.memory) for slot in feed.slots} == mappings
    assert not feed.out
    assert feed.most_out <= 2
