"""Two buckets in memory that processes of one host share.

The memory is anonymous (`memfd`): it has no name under /dev/shm, is not bound by that mount's
size, and goes away with the last process that holds it, however that process ends.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roll.weight_sync.receive_buffer import SharedBuffer


@dataclass(frozen=True, slots=True)
class HostBuckets:
    """A sender's view of the two buckets on the CPU."""

    fd: int
    buckets: tuple[Tensor, Tensor]

    @classmethod
    def create(cls, num_bytes: int) -> HostBuckets:
        """Two buckets of at least `num_bytes`; pages cost memory from their first use on."""
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("roll-weights")
        os.ftruncate(fd, 2 * size)
        return cls.open(fd, size)

    @classmethod
    def open(cls, fd: int, num_bytes: int) -> HostBuckets:
        """Buckets that another sender created; takes over the descriptor."""
        memory = torch.frombuffer(mmap.mmap(fd, 2 * num_bytes), dtype=torch.uint8)
        return cls(fd, (memory[:num_bytes], memory[num_bytes:]))

    def describe(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        """A message and file descriptors from which others open the same memory."""
        return {"kind": "memfd", "num_bytes": len(self.buckets[0])}, (self.fd,)

    def sync(self) -> None:
        """Host memory is coherent; nothing to wait for."""

    def close(self) -> None:
        os.close(self.fd)


def shared_buffers(fd: int, num_bytes: int) -> tuple[SharedBuffer, SharedBuffer]:
    """A receiver's view of the two buckets."""
    return SharedBuffer(fd, 0, num_bytes), SharedBuffer(fd, num_bytes, num_bytes)
