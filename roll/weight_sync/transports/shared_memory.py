"""Two buckets in memory that processes of one host share.

The memory is anonymous (`memfd`): it has no name under /dev/shm and is not limited by the size of
that mount. The kernel frees it when the last process that holds it ends, in whatever way.
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
        """Create two buckets of at least `num_bytes` each; pages take memory when first used."""
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("roll-weights")
        os.ftruncate(fd, 2 * size)
        return cls.open(fd, size)

    @classmethod
    def open(cls, fd: int, num_bytes: int) -> HostBuckets:
        """Map two existing buckets of `num_bytes` each; `close` closes the descriptor `fd`."""
        memory = torch.frombuffer(mmap.mmap(fd, 2 * num_bytes), dtype=torch.uint8)
        return cls(fd, (memory[:num_bytes], memory[num_bytes:]))

    def describe(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Return a message and the file descriptor with which others can open the same memory."""
        return {"kind": "memfd", "num_bytes": len(self.buckets[0])}, (self.fd,)

    def sync(self) -> None:
        """Do nothing: writes to host memory are visible to other processes at once."""

    def close(self) -> None:
        os.close(self.fd)


def shared_buffers(fd: int, num_bytes: int) -> tuple[SharedBuffer, SharedBuffer]:
    """Map the two buckets for a receiver; `num_bytes` is the size of one."""
    return SharedBuffer(fd, 0, num_bytes), SharedBuffer(fd, num_bytes, num_bytes)
