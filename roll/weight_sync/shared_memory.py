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


@dataclass(frozen=True, slots=True)
class HostBuckets:
    """The sender's two buckets on the CPU."""

    fd: int
    buckets: tuple[Tensor, Tensor]

    @classmethod
    def create(cls, num_bytes: int) -> HostBuckets:
        """Two buckets of `num_bytes`; pages cost memory from their first use on."""
        fd = os.memfd_create("roll-weights")
        os.ftruncate(fd, 2 * num_bytes)
        return cls(fd, _map(fd, num_bytes))

    def describe(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        """A message and file descriptors from which a receiver opens the same memory."""
        return {"kind": "memfd", "num_bytes": len(self.buckets[0])}, (self.fd,)

    def sync(self) -> None:
        """Host memory is coherent; nothing to wait for."""

    def close(self) -> None:
        os.close(self.fd)


def open_host_buckets(description: dict[str, Any], fds: list[int]) -> tuple[Tensor, Tensor]:
    """The receiver's view of the buckets; closes the descriptors, the mapping keeps the memory."""
    try:
        return _map(fds[0], description["num_bytes"])
    finally:
        for fd in fds:
            os.close(fd)


def _map(fd: int, num_bytes: int) -> tuple[Tensor, Tensor]:
    memory = torch.frombuffer(mmap.mmap(fd, 2 * num_bytes), dtype=torch.uint8)
    return memory[:num_bytes], memory[num_bytes:]
