"""Two buckets in GPU memory, opened by a process on the same GPU through CUDA IPC handles."""

from __future__ import annotations

import base64
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from roll.weight_sync.slots import DeviceSlot


@dataclass(frozen=True, slots=True)
class CudaBuckets:
    """The sender's two buckets on its current GPU."""

    memory: Tensor
    buckets: tuple[Tensor, Tensor]

    @classmethod
    def create(cls, num_bytes: int) -> CudaBuckets:
        memory = torch.empty(2 * num_bytes, dtype=torch.uint8, device="cuda")
        return cls(memory, (memory[:num_bytes], memory[num_bytes:]))

    def describe(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        """A message from which a receiver opens the same memory; the handle is pickled, and only
        a process of the same user can be at the other end of the link."""
        handle = base64.b64encode(pickle.dumps(_reduce(self.memory))).decode()
        return {"kind": "cuda", "handle": handle}, ()

    def sync(self) -> None:
        """Wait for this process's copies: the other process's stream does not know of them."""
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """The allocator takes the memory back once the last receiver has closed it."""


def open_cuda_buckets(description: dict[str, Any]) -> tuple[DeviceSlot, DeviceSlot]:
    """A receiver's view; hold it only while receiving, the sender's memory is pinned by it."""
    rebuild, args = pickle.loads(base64.b64decode(description["handle"]))
    memory: Tensor = rebuild(*args)
    half = len(memory) // 2
    return DeviceSlot(memory[:half]), DeviceSlot(memory[half:])


def _reduce(memory: Tensor) -> Any:
    return reduce_tensor(memory)  # type: ignore[no-untyped-call]
