"""NVIDIA GPUs. The process sees only the GPUs of its slots, so its own one is number 0."""

from __future__ import annotations

import torch

from roll.platform.base import MemoryStats, Place, join_group, leave_group
from roll.platform.machine import GIB


class CudaPlatform:
    @property
    def name(self) -> str:
        return "cuda"

    @property
    def collective_backend(self) -> str:
        # Both: weights on the CPU (offloaded, or on their way to a checkpoint) are gathered too.
        return "cpu:gloo,cuda:nccl"

    @property
    def visible_devices_variable(self) -> str | None:
        return "CUDA_VISIBLE_DEVICES"

    def count_devices(self) -> int:
        return torch.cuda.device_count()

    def device(self, place: Place) -> torch.device:
        return torch.device("cuda", 0)

    def memory(self) -> MemoryStats:
        free, total = torch.cuda.mem_get_info()
        return MemoryStats(
            (total - free) / GIB, torch.cuda.max_memory_allocated() / GIB, total / GIB
        )

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def set_threads(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def init_process_group(self, place: Place, timeout_s: float) -> None:
        # NCCL takes the current device; without this every rank would guess from its number.
        torch.cuda.set_device(self.device(place))
        join_group(self.collective_backend, place, timeout_s)

    def destroy(self) -> None:
        leave_group()
