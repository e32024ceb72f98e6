"""Resources of this machine: GPUs, cores, memory. No import of torch, so `roll check` is fast."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GIB = 1024**3
PROC_GPUS = Path("/proc/driver/nvidia/gpus")
DEVICES = Path("/dev")
PROC_CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
PROC_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 20_000
"""Ray's workers use ports up to 19,999."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources of one node that a run may use.

    Example: Machine(gpus=0, cores=(0, 1), memory_gb=23.4)
    """

    gpus: int
    cores: tuple[int, ...]
    """Numbers of the CPU cores, as the operating system counts them."""
    memory_gb: float
    """Main memory in GiB; the limit of the container if that is lower."""


def this_machine() -> Machine:
    """Return the GPUs, the cores and the memory that this process may use."""
    return Machine(count_gpus(), cores(), memory_gb())


def count_gpus(
    environ: Mapping[str, str] | None = None,
    proc_gpus: Path = PROC_GPUS,
    devices: Path = DEVICES,
) -> int:
    """Return the number of NVIDIA GPUs that CUDA shows to a process with these variables.

    Ids of GPUs and of MIG slices in `CUDA_VISIBLE_DEVICES` are counted, but not looked up.

    Args:
        environ: environment variables, of which only `CUDA_VISIBLE_DEVICES` and `PATH` matter; by
            default those of this process.
        proc_gpus: folder in which the driver lists the GPUs. Without it, nvidia-smi is asked.
        devices: folder with a device node for each GPU that this process may use.
    """
    environ = os.environ if environ is None else environ
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    present = _count_present(proc_gpus, devices, environ.get("PATH"))
    if visible is None or not present:
        return present
    count = 0
    for name in visible.split(","):
        # CUDA ignores the first invalid name and all names after it; so does this count.
        number = name.strip()
        if not number or number == "-1" or (number.isdecimal() and int(number) >= present):
            break
        count += 1
    return count


def _count_present(proc_gpus: Path, devices: Path, path: str | None) -> int:
    """Return the number of GPUs that this process may use: those that the driver lists, if there
    are nodes of all of them, else those that nvidia-smi lists within 20 s, else the nodes."""
    if proc_gpus.is_dir():
        listed = sum(1 for _ in proc_gpus.iterdir())
        # Containers see the list of the whole machine, but have nodes of their own GPUs alone.
        if _count_nodes(devices) >= listed:
            return listed
    # Some containers hide the folder of the driver but provide nvidia-smi. On a machine whose GPUs
    # nobody has used yet, it also makes the nodes.
    program = shutil.which("nvidia-smi", path=path)
    if program is None:
        return _count_nodes(devices)
    command = [program, "--list-gpus"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return _count_nodes(devices)
    return sum(line.startswith("GPU ") for line in told.stdout.splitlines())


def _count_nodes(devices: Path) -> int:
    """Return the number of device nodes of GPUs (`nvidia0`); others of the driver have no
    number."""
    return sum(node.name.removeprefix("nvidia").isdecimal() for node in devices.glob("nvidia*"))


def gpu_memory_gb(environ: Mapping[str, str] | None = None) -> float | None:
    """Return the memory of the smallest GPU that CUDA shows to a process with these variables, in
    GiB; None if there is none, if it shows slices of GPUs (MIG), or if nvidia-smi does not tell it
    within 20 s.

    Args:
        environ: as for `count_gpus`, but `PATH` matters, too. The numbers of GPUs are taken for
            those of nvidia-smi.
    """
    environ = os.environ if environ is None else environ
    told = _told_of_gpus("memory.total", environ)
    shown = _shown_of(list(told), environ.get("CUDA_VISIBLE_DEVICES"))
    sizes = [told[uuid] for uuid in shown or ()]
    known = [size / 1024 for size in sizes if size is not None]
    return min(known, default=None)


def _shown_of(uuids: Sequence[str], visible: str | None) -> Sequence[str] | None:
    """Return those of the GPUs of this machine that `CUDA_VISIBLE_DEVICES` shows; None if it shows
    slices of them."""
    if visible is None:
        return uuids
    shown: list[str] = []
    for name in map(str.strip, visible.split(",")):
        if name.startswith("MIG-"):
            return None
        if name.isdecimal():
            found = uuids[int(name) : int(name) + 1]
        else:  # the beginning of an id is enough
            found = [uuid for uuid in uuids if name and uuid.startswith(name)]
        if len(found) != 1:  # as in `count_gpus`
            break
        shown += found
    return shown


def gpu_capability() -> float | None:
    """Return the lowest compute capability of the GPUs of this machine, such as 9.0; None if
    nvidia-smi does not tell it within 20 s."""
    told = _told_of_gpus("compute_cap", os.environ).values()
    return min((value for value in told if value is not None), default=None)


def _told_of_gpus(key: str, environ: Mapping[str, str]) -> dict[str, float | None]:
    """Return the number that nvidia-smi tells of each GPU of this machine under this key, by the id
    of the GPU, in the order of their numbers; None for what is no number."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return {}
    command = [program, f"--query-gpu=uuid,{key}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return {}
    lines = [line.split(",") for line in told.stdout.splitlines() if line.count(",") == 1]
    numbers = {uuid.strip(): word.strip() for uuid, word in lines}
    return {
        uuid: float(word) if word.replace(".", "", 1).isdecimal() else None
        for uuid, word in numbers.items()
    }


def missing_for_compile(gpus: bool, environ: Mapping[str, str] | None = None) -> str:
    """Return what torch.compile lacks on this machine, and what to do; empty if nothing.

    Args:
        gpus: True if GPUs compute; they need a C compiler (Triton), CPUs a C++ compiler.
        environ: environment variables; by default those of this process.
    """
    environ = os.environ if environ is None else environ
    if environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCHDYNAMO_DISABLE=1 switches it off; unset it"
    variable, names = ("CC", ("gcc", "clang")) if gpus else ("CXX", ("g++",))
    names = (environ[variable],) if variable in environ else names
    if not any(shutil.which(name, path=environ.get("PATH")) for name in names):
        what = "C" if gpus else "C++"
        return (
            f"it needs a {what} compiler, and there is no {' or '.join(names)} here; install one, "
            f"or name it in {variable}"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        return f"it needs Python's headers, and {header} is missing; install python3-dev"
    return ""


def cores() -> tuple[int, ...]:
    """Return the numbers of the CPU cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def memory_gb() -> float:
    """Return the main memory that this process may use, in GiB: that of the machine, or the limit
    of the container if that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *memory_limits()]) / GIB


def memory_limits(own: Path = PROC_CGROUP, mounted: Path = CGROUPS) -> list[int]:
    """Return the memory limits of this process, in bytes: one of its control group and one of each
    group that contains this group, as far as they have a limit.

    Args:
        own: file that lists the control groups of this process.
        mounted: folder at which the control groups are mounted.
    """
    return [group.limit for group in memory_groups(own, mounted)]


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group with a memory limit."""

    folder: Path
    limit: int
    """In bytes."""


def memory_groups(own: Path = PROC_CGROUP, mounted: Path = CGROUPS) -> list[MemoryGroup]:
    """Return the control groups whose memory limits `memory_limits` returns."""
    groups = []
    for line in own.read_text().splitlines() if own.is_file() else []:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = mounted / "memory" if controllers else mounted
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        # In a container the named folder may be missing; its files are then in the top folder.
        inner = top / group.lstrip("/")
        around = [folder for folder in inner.parents if folder.is_relative_to(top)]
        for folder in (inner, *around):
            file = folder / name
            text = file.read_text().strip() if file.is_file() else "max"
            if text.isdigit():
                groups.append(MemoryGroup(folder, int(text)))
    return groups


def free_port(handed_out: Path = PROC_PORTS) -> int:
    """Return a TCP port that is free now. Another process may take the port, so use it soon.

    The kernel hands out a range of ports for outgoing connections and to processes that ask for any
    port. A port below this range stays free until a process asks for this very port.

    Args:
        handed_out: file that holds the first and the last port of this range.
    """
    first = int(handed_out.read_text().split()[0]) if handed_out.is_file() else 0
    for _ in range(100 if first > _LOWEST_PORT else 0):
        # Not from `random`: processes that share a seed would try the same ports.
        port = _LOWEST_PORT + secrets.randbelow(first - _LOWEST_PORT)
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    """Return whether no socket is bound to a TCP port, at any address."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
