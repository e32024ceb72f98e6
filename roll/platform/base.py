"""`Platform`: what differs between device kinds.

A worker without tensors (a reward) has a platform too, so torch is imported where it is used: it
would take 130 MB of each such process.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from roll.platform.rendezvous import open_store

if TYPE_CHECKING:
    import torch


class WorkerPlace(Protocol):
    """What a platform needs to know about a worker; a `WorkerSpec` is one."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def devices(self) -> tuple[int, ...]: ...
    @property
    def rendezvous(self) -> str: ...


class Platform(Protocol):
    """One kind of device."""

    @property
    def name(self) -> str: ...

    @property
    def collective_backend(self) -> str:
        """What `torch.distributed` calls the way ranks talk."""
        ...

    def device(self, place: WorkerPlace) -> torch.device:
        """Where this worker's tensors live; a process sees only its own devices."""
        ...

    def set_threads(self, num_threads: int) -> None:
        """Threads of one tensor operation on the CPU."""
        ...

    def init_process_group(self, place: WorkerPlace, timeout_s: float) -> None:
        """Join the ranks of this worker's cluster; every rank calls it.

        Raises:
            torch.distributed.DistError: the others did not come within `timeout_s`.
        """
        ...

    def destroy(self) -> None:
        """Leave the process group, if one was joined."""
        ...


def set_threads(num_threads: int) -> None:
    """Threads of torch; where it is not loaded, OMP_NUM_THREADS tells it when it is."""
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(num_threads)


def join_group(backend: str, place: WorkerPlace, timeout_s: float) -> None:
    """`torch.distributed` over TCP at the address in `place`; reads no environment."""
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
    if "torch" not in sys.modules:  # then no group was joined
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
