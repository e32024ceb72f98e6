"""The platform of machines without GPUs: tensors on the CPU, communication by gloo."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll.platform.base import WorkerPlace, join_group, leave_group, set_threads

if TYPE_CHECKING:
    import torch


class CpuPlatform:
    @property
    def name(self) -> str:
        return "cpu"

    @property
    def collective_backend(self) -> str:
        return "gloo"

    def device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def set_threads(self, num_threads: int) -> None:
        set_threads(num_threads)

    def init_process_group(self, place: WorkerPlace, timeout_s: float) -> None:
        """Join the cluster's group (gloo). Collective; errors as in `Platform`."""
        join_group(self.collective_backend, place, timeout_s)

    def destroy(self) -> None:
        leave_group()
