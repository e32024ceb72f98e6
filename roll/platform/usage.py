"""Use of a machine and its GPUs at a moment: memory, cores, network, disks.

What only grows, such as bytes received, is counted since the machine has started; `rates` compares
two moments. No import of torch: workers without tensors ask, too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from roll.platform.machine import CGROUPS, GIB, PROC_CGROUP, memory_groups

MB = 10**6
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/sys/class/net")
BLOCKS = Path("/sys/block")
UNKNOWN = (OSError, RuntimeError, NotImplementedError, ValueError)
"""Errors of what a kernel or a container does not tell."""


@dataclass(frozen=True, slots=True)
class MachineUse:
    """Use of a machine at a moment; None: it is not told here."""

    machine: str
    """Name that no other machine has, and that changes when it starts anew."""
    at_s: float
    """Moment, on a clock of this machine that never goes back, in seconds."""
    busy_s: float
    """Time that all cores together have worked, in seconds."""
    cores: int
    memory_used: int
    """Bytes that programs use, without the kernel's cache of files."""
    memory_total: int
    group_used: int | None
    """Bytes that count for the memory limit of the control group (container), without the cache of
    files that could be dropped."""
    group_limit: int | None
    received: int | None
    """Bytes that have come in through the network."""
    sent: int | None
    read: int | None
    """Bytes that were read from disks."""
    written: int | None


def use_of_machine() -> MachineUse:
    """Return how this machine is used now."""
    memory, times = psutil.virtual_memory(), psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    # What guests of the machine use is in `user` and `nice`, too.
    guests_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    received, sent = _sums(_network(), "bytes_recv", "bytes_sent")
    read, written = _sums(_disks(), "read_bytes", "write_bytes")
    used, limit = group_memory()
    return MachineUse(
        machine=_name(),
        at_s=time.monotonic(),
        busy_s=sum(times) - idle_s - guests_s,
        cores=psutil.cpu_count() or 1,
        memory_used=memory.total - memory.available,
        memory_total=memory.total,
        group_used=used,
        group_limit=limit,
        received=received,
        sent=sent,
        read=read,
        written=written,
    )


def rates(before: MachineUse, now: MachineUse) -> dict[str, float]:
    """Return what was used between two moments of one machine, as numbers by the names of
    metrics."""
    seconds = max(now.at_s - before.at_s, 1e-9)
    found = {"cpu_share": min(1.0, (now.busy_s - before.busy_s) / seconds / now.cores)}
    for name, start, end in (
        ("network_in_mb_per_s", before.received, now.received),
        ("network_out_mb_per_s", before.sent, now.sent),
        ("disk_read_mb_per_s", before.read, now.read),
        ("disk_write_mb_per_s", before.written, now.written),
    ):
        if start is not None and end is not None:
            found[name] = (end - start) / seconds / MB
    # Counters of a device that has gone, or started anew, are smaller than before.
    return {name: max(0.0, value) for name, value in found.items()}


def group_memory(own: Path = PROC_CGROUP, mounted: Path = CGROUPS) -> tuple[int | None, int | None]:
    """Return the bytes that count for the lowest memory limit of this process's control groups, and
    that limit; None twice without one. Arguments as for `memory_limits`."""
    physical = psutil.virtual_memory().total
    limits = [one for one in memory_groups(own, mounted) if one.limit < physical]
    if not limits:  # version 1 writes a huge number where there is no limit
        return None, None
    lowest = min(limits, key=lambda one: one.limit)
    usage, key = lowest.folder / "memory.current", "inactive_file"
    if not usage.is_file():  # version 1 of control groups
        usage, key = lowest.folder / "memory.usage_in_bytes", "total_inactive_file"
    try:
        used = int(usage.read_text())
        told = (lowest.folder / "memory.stat").read_text().splitlines()
    except UNKNOWN:
        return None, None
    cached = [int(line.split()[1]) for line in told if line.split()[0] == key]
    return max(0, used - sum(cached)), lowest.limit


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Use of a GPU at a moment, as one process sees it; None: it is not told here."""

    machine: str
    number: int
    """Number on its machine."""
    name: str | None
    """Name of the product."""
    utilisation: float | None
    """Share of the last sample period of the driver (a second at most) in which a kernel ran."""
    used: int | None
    """Bytes that all processes use."""
    total: int | None
    allocated: int | None
    """Bytes of tensors of this process."""
    reserved: int | None
    """Bytes that PyTorch keeps in this process, for tensors and for later ones."""
    largest: int | None
    """Most bytes of tensors since the last question."""


def use_of_gpus(numbers: Iterable[int]) -> list[GpuUse]:
    """Return how the GPUs are used that this process sees; nothing if it has not loaded torch.

    Utilisation and memory of all processes need NVIDIA's nvidia-ml-py, which comes with the
    requirements for GPUs. CUDA is not started for this.

    Args:
        numbers: numbers of the GPUs on this machine, in the order in which the process sees them.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    return [use_of_gpu(torch.cuda, place, number) for place, number in enumerate(numbers)]


def use_of_gpu(cuda: Any, place: int, number: int) -> GpuUse:
    """Return the use of the GPU that this process sees at `place`; `cuda` is `torch.cuda`."""
    own: dict[str, Any] = {"name": None, "allocated": None, "reserved": None, "largest": None}
    total = None
    if cuda.is_initialized():
        known = cuda.get_device_properties(place)
        total = int(known.total_memory)
        own = {
            "name": str(known.name),
            "allocated": int(cuda.memory_allocated(place)),
            "reserved": int(cuda.memory_reserved(place)),
            "largest": int(cuda.max_memory_allocated(place)),
        }
        cuda.reset_peak_memory_stats(place)
    percent = _told(lambda: cuda.utilization(place))
    return GpuUse(
        machine=_name(),
        number=number,
        utilisation=None if percent is None else percent / 100,
        used=_told(lambda: cuda.device_memory_used(place)),
        total=total,
        **own,
    )


def _told(ask: Callable[[], int]) -> int | None:
    """Return a number of NVML; None if it is not installed, or does not tell it (of MIG slices)."""
    try:
        return int(ask())
    except ImportError:
        return None
    except Exception as error:
        if type(error).__module__.startswith("pynvml") or isinstance(error, UNKNOWN):
            return None
        raise


@dataclass(frozen=True, slots=True)
class WorkerUse:
    """Use of a worker's processes, machine and GPUs at a moment."""

    resident: int
    """Resident memory of its process and all descendants, in bytes. A page that several of them
    share counts once for each."""
    machine: MachineUse
    gpus: list[GpuUse]


def free_gb(folder: Path) -> float | None:
    """Return the free space on the disk of a folder, in GiB, as a program without special rights
    may use it; None if the folder is not there."""
    try:
        return psutil.disk_usage(str(folder)).free / GIB
    except UNKNOWN:
        return None


def _name() -> str:
    """Return the name of this machine for this time that it runs; containers share it."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return "this machine"


def _network() -> Mapping[str, Any]:
    """Return the counters of the network devices: of those that are hardware, because others
    (bridges, tunnels) repeat what goes through them; in a container, of all but the loopback."""
    try:
        told = psutil.net_io_counters(pernic=True)
    except UNKNOWN:
        return {}
    return _hardware(told, NETWORK) or {name: own for name, own in told.items() if name != "lo"}


def _disks() -> Mapping[str, Any]:
    """Return the counters of the disks that are hardware, without those of their partitions."""
    try:
        return _hardware(psutil.disk_io_counters(perdisk=True) or {}, BLOCKS)
    except UNKNOWN:
        return {}


def _hardware(told: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the counters of what the kernel lists in a folder with a device behind it."""
    return {name: own for name, own in told.items() if (folder / name / "device").exists()}


def _sums(told: Mapping[str, Any], *names: str) -> tuple[int | None, ...]:
    """Return the sums of some counters over all devices; None without any device."""
    if not told:
        return (None,) * len(names)
    return tuple(sum(getattr(own, name) for own in told.values()) for name in names)
