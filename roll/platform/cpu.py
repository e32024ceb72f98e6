"""The CPU as a platform of its own: gloo, slots of cores, a thread budget."""

from __future__ import annotations

import torch

from roll.platform.base import MemoryStats, Place, join_group, leave_group
from roll.platform.machine import GIB, cores, memory_gb
from roll.platform.processes import peak_rss_bytes, rss_bytes


class CpuPlatform:
    @property
    def name(self) -> str:
        return "cpu"

    @property
    def collective_backend(self) -> str:
        return "gloo"

    @property
    def visible_devices_variable(self) -> str | None:
        return None

    def count_devices(self) -> int:
        return len(cores())

    def device(self, place: Place) -> torch.device:
        return torch.device("cpu")

    def memory(self) -> MemoryStats:
        return MemoryStats(rss_bytes() / GIB, peak_rss_bytes() / GIB, memory_gb())

    def reset_peak(self) -> None:
        """Nothing to do: the kernel keeps one peak for the life of a process."""

    def set_threads(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def init_process_group(self, place: Place, timeout_s: float) -> None:
        join_group(self.collective_backend, place, timeout_s)

    def destroy(self) -> None:
        leave_group()
