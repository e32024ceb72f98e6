"""What this machine has: GPUs, cores, memory. Free of torch, so that `roll check` stays fast."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GIB = 1024**3
PROC_GPUS = Path("/proc/driver/nvidia/gpus")
PROC_CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Machine:
    """One node as a run may use it.

    Example: Machine(gpus=0, cores=(0, 1), memory_gb=23.4)
    """

    gpus: int
    cores: tuple[int, ...]
    """Numbers of the CPU cores."""
    memory_gb: float
    """Main memory in GiB, within the limit of the container."""


def this_machine() -> Machine:
    return Machine(count_gpus(), cores(), memory_gb())


def count_gpus(environ: Mapping[str, str] | None = None, proc_gpus: Path = PROC_GPUS) -> int:
    """NVIDIA GPUs that CUDA would show this process."""
    visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    present = _count_present(proc_gpus)
    if visible is None or not present:
        return present
    count = 0
    for name in visible.split(","):
        # CUDA stops at the first name that is no device, and so does this count.
        number = name.strip()
        if not number or number == "-1" or (number.isdigit() and int(number) >= present):
            break
        count += 1
    return count


def _count_present(proc_gpus: Path) -> int:
    if proc_gpus.is_dir():
        return sum(1 for _ in proc_gpus.iterdir())
    # Some containers hide the driver's folder but bring the tool.
    if shutil.which("nvidia-smi") is None:
        return 0
    command = ["nvidia-smi", "--list-gpus"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def cores() -> tuple[int, ...]:
    """CPU cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def memory_gb() -> float:
    """Main memory that this process may use: the machine's, or its container's limit if lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *memory_limits()]) / GIB


def memory_limits(own: Path = PROC_CGROUP, mounted: Path = CGROUPS) -> list[int]:
    """Limits in bytes that control groups put on this process, one for each group around it.

    Args:
        own: the file that says which groups this process is in.
        mounted: where the groups' own files are.
    """
    limits = []
    for line in own.read_text().splitlines() if own.is_file() else []:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = mounted / "memory" if controllers else mounted
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        # Inside a container the named folder may not be there, and its content lies at the top.
        inner = top / group.lstrip("/")
        around = [folder for folder in inner.parents if folder.is_relative_to(top)]
        for file in (folder / name for folder in (inner, *around)):
            text = file.read_text().strip() if file.is_file() else "max"
            if text.isdigit():
                limits.append(int(text))
    return limits


def free_port() -> int:
    """A TCP port that is free now; whoever uses it should do so soon."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
