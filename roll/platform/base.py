"""`Platform`: the interface to one kind of device.

Workers that use no tensors (rewards) have a platform too. So torch is imported only in the
functions that use it: importing torch would take 130 MB in each of these processes.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from roll.platform.rendezvous import open_store

if TYPE_CHECKING:
    import torch


class WorkerPlace(Protocol):
    """The facts about a worker that a platform needs; every `WorkerSpec` has them."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def rendezvous(self) -> str:
        """Address `host:port` at which rank 0 serves the store through which the ranks meet."""
        ...


class Platform(Protocol):
    """Interface to one kind of device."""

    @property
    def name(self) -> str:
        """`cpu` or `cuda`."""
        ...

    @property
    def collective_backend(self) -> str:
        """Name of the backend with which `torch.distributed` connects the ranks."""
        ...

    def device(self) -> torch.device:
        """Return the device for this worker's tensors. A process sees only its own devices."""
        ...

    def set_threads(self, num_threads: int) -> None:
        """Set the number of threads that compute one tensor operation on the CPU."""
        ...

    def init_process_group(self, place: WorkerPlace, timeout_s: float) -> None:
        """Join the process group of this worker's cluster. Every rank must call this method.

        Args:
            timeout_s: time limit of joining, and of each later collective, in seconds.

        Raises:
            torch.distributed.DistError: not all ranks joined within `timeout_s`.
            RuntimeError: rank 0 cannot listen at the rendezvous.
        """
        ...

    def destroy(self) -> None:
        """Leave the process group, if this process has joined one."""
        ...


def set_threads(num_threads: int) -> None:
    """Set the number of threads of torch, if torch is loaded. If torch is loaded later, it takes
    the number from OMP_NUM_THREADS."""
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(num_threads)


def join_group(backend: str, place: WorkerPlace, timeout_s: float) -> None:
    """Initialize the default process group of `torch.distributed` over TCP, with rank 0 at
    `place.rendezvous`. Collective. No environment variables are read.

    Args:
        backend: name of the backend, as for `init_process_group` of torch.
        timeout_s: time limit of joining, and of each later collective, in seconds.

    Raises:
        RuntimeError: rank 0 cannot listen at the rendezvous, or not all ranks joined in time.
    """
    import torch.distributed as dist

    host, _, port = place.rendezvous.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        backend,
        store=open_store(
            host,
            int(port),
            serves=place.rank == 0,
            timeout=timeout,
            world_size=place.world_size,
        ),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
    )


def leave_group() -> None:
    """Destroy the default process group, if this process has joined one."""
    if "torch" not in sys.modules:  # without torch, this process has joined no group
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
