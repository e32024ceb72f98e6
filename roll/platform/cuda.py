"""The platform of NVIDIA GPUs. A process sees only the GPUs of its worker and uses number 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll.platform.base import WorkerPlace, join_group, leave_group, set_threads

if TYPE_CHECKING:
    import torch


class CudaPlatform:
    @property
    def name(self) -> str:
        return "cuda"

    @property
    def collective_backend(self) -> str:
        # Both backends: ranks also gather weights on the CPU (offloaded ones, and for checkpoints).
        return "cpu:gloo,cuda:nccl"

    def device(self) -> torch.device:
        import torch

        return torch.device("cuda", 0)

    def set_threads(self, num_threads: int) -> None:
        set_threads(num_threads)

    def init_process_group(self, place: WorkerPlace, timeout_s: float) -> None:
        """Make the first visible GPU current, for NCCL, and join the cluster's group.

        Collective; errors as in `Platform`. The group uses gloo for tensors on the CPU.
        """
        import torch

        # NCCL uses the current device. Without this call, each rank derives a GPU from its number.
        torch.cuda.set_device(self.device())
        join_group(self.collective_backend, place, timeout_s)

    def destroy(self) -> None:
        leave_group()


def wait_for_device() -> None:
    """Wait until the device has done all that it was asked for. Where CUDA is not in use, do
    nothing."""
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def device_name() -> str | None:
    """Return the name of the GPU of this process; None where CUDA is not in use."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return str(torch.cuda.get_device_name(0))


def free_cached() -> None:
    """Give memory that PyTorch keeps reserved back to the device, and with it the buckets of a push
    that their last receiver has closed. Other processes on the GPU, such as an engine that wakes
    up, take theirs from the driver. Where CUDA is not in use, do nothing."""
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
