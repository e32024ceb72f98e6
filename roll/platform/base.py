"""`Platform`: what differs between device kinds."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist


class Place(Protocol):
    """What a platform needs to know about a worker; a `WorkerSpec` is one."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def devices(self) -> tuple[int, ...]: ...
    @property
    def rendezvous(self) -> str: ...


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Memory of one device, in GiB."""

    used_gb: float
    peak_gb: float
    """Since `reset_peak`, where the platform can tell; else since the process began."""
    total_gb: float


class Platform(Protocol):
    """One kind of device."""

    @property
    def name(self) -> str: ...

    @property
    def collective_backend(self) -> str:
        """What `torch.distributed` calls the way ranks talk."""
        ...

    @property
    def visible_devices_variable(self) -> str | None:
        """Environment variable that hides devices from a process; None where there is none."""
        ...

    def count_devices(self) -> int:
        """Devices this process may use."""
        ...

    def device(self, place: Place) -> torch.device:
        """Where this worker's tensors live; a process sees only its own devices."""
        ...

    def memory(self) -> MemoryStats: ...

    def reset_peak(self) -> None: ...

    def set_threads(self, num_threads: int) -> None:
        """Threads of one tensor operation on the CPU."""
        ...

    def init_process_group(self, place: Place, timeout_s: float) -> None:
        """Join the ranks of this worker's cluster; every rank calls it.

        Raises:
            torch.distributed.DistError: the others did not come within `timeout_s`.
        """
        ...

    def destroy(self) -> None:
        """Leave the process group, if one was joined."""
        ...


def join_group(backend: str, place: Place, timeout_s: float) -> None:
    """`torch.distributed` over TCP at the address in `place`; reads no environment."""
    dist.init_process_group(
        backend,
        init_method=f"tcp://{place.rendezvous}",
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
