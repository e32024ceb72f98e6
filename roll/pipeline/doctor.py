"""What this machine has and what it lacks, a line of advice for each thing missing."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from roll.config.placement import ClusterConfig
from roll.distributed.layout import address_to_join
from roll.platform.machine import this_machine
from roll.strategy.available import REQUIREMENTS, Requirement, status

RAY = Requirement(("ray",), SpecifierSet(">=2.60,<2.61"), "pip install -r requirements/base.txt")


@dataclass(frozen=True, slots=True)
class Line:
    what: str
    found: str
    supported: str
    ok: bool
    advice: str = ""


def examine() -> list[Line]:
    """Python, machine, Ray and every backend; imports none of them."""
    return [
        _python(),
        *_machine(),
        examine_ray(RAY),
        *_backends(),
        *_small_things(),
    ]


def _python() -> Line:
    found = platform.python_version()
    ok = tuple(int(part) for part in found.split(".")[:2]) >= (3, 11)
    return Line("python", found, ">=3.11", ok, "" if ok else "install Python 3.11 or newer")


def _machine() -> list[Line]:
    machine = this_machine()
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    shared_gb = shared.free / 2**30 if shared else 0.0
    enough = shared_gb >= 0.5
    return [
        Line("GPUs", str(machine.gpus), "", True, "" if machine.gpus else "none: runs use the CPU"),
        Line("cores", str(len(machine.cores)), ">=1", True),
        Line("memory", f"{machine.memory_gb:.1f} GiB", "", True),
        Line(
            "/dev/shm",
            f"{shared_gb:.1f} GiB free",
            ">=0.5 GiB",
            enough,
            "" if enough else "Ray keeps its objects in it: enlarge it (docker: --shm-size=4g)",
        ),
    ]


def examine_ray(need: Requirement) -> Line:
    """Ray in the supported version, and which cluster a run would use."""
    address = address_to_join(ClusterConfig())
    where = f", joins {address}" if address else ", starts a local one"
    found = status("ray", need)
    shown = found.installed + where if found.installed else "-"
    return Line("ray", shown, found.supported, found.ok, found.advice)


def _backends() -> list[Line]:
    lines = []
    for kind in REQUIREMENTS:
        found = status(kind)
        lines.append(
            Line(f"backend {kind}", found.installed or "-", found.supported, found.ok, found.advice)
        )
    return lines


def _small_things() -> list[Line]:
    lscpu = shutil.which("lscpu")
    advice = "" if lscpu else "vLLM on CPUs calls it: install util-linux"
    return [Line("lscpu", lscpu or "-", "", lscpu is not None, advice)]
