"""`roll doctor`: what this machine has and what it lacks, with advice for each missing thing."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from roll.config.sections.placement import ClusterConfig
from roll.distributed.device_layout import address_to_join
from roll.distributed.on_ray.token import HOW_TO_USE_A_TOKEN, found_token
from roll.platform.machine import this_machine
from roll.sandbox import NoLevelError, Sandbox
from roll.sandbox.levels import NEEDS
from roll.strategy.available import REQUIREMENTS, Requirement, status

TRAINING = ("fsdp2", "deepspeed", "megatron")
ENGINES = ("vllm", "sglang", "hf")

RAY = Requirement(("ray",), SpecifierSet(">=2.60,<2.61"), "pip install -r requirements/base.txt")


@dataclass(frozen=True, slots=True)
class Line:
    what: str
    found: str
    supported: str
    ok: bool
    advice: str = ""
    needed: bool = True
    """False if runs are possible without it; the advice then says how to get it."""


def examine() -> list[Line]:
    """Return a line for Python, machine, Ray, every backend and lscpu; imports no backend."""
    return [
        _python(),
        *_machine(),
        examine_ray(RAY),
        examine_token(),
        *examine_backends(),
        _lscpu(),
        *examine_sandbox(),
    ]


def _python() -> Line:
    found = platform.python_version()
    ok = tuple(int(part) for part in found.split(".")[:2]) >= (3, 11)
    return Line("python", found, ">=3.11", ok, "" if ok else "install Python 3.11 or newer")


def _machine() -> list[Line]:
    """Return lines for GPUs, cores, memory and /dev/shm; only too little free space in the last
    counts as a fault."""
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
    """Return a line with Ray's version and the cluster that a run would use."""
    address = address_to_join(ClusterConfig())
    where = f", joins {address}" if address else ", starts a local one"
    found = status("ray", need)
    shown = found.installed + where if found.installed else "-"
    return Line("ray", shown, found.supported, found.ok, found.advice)


def examine_token(environ: Mapping[str, str] = os.environ) -> Line:
    """Return a line about the token that protects the Ray cluster which a run would use."""
    address = address_to_join(ClusterConfig(), environ)
    if address is None:
        return Line("Ray's token", "a fresh one for each run, which listens on 127.0.0.1", "", True)
    token = found_token(environ)
    if token is None or environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        advice = f"whoever reaches {address} may run code there, unless: {HOW_TO_USE_A_TOKEN}"
        return Line("Ray's token", "-", "", False, advice, needed=False)
    return Line("Ray's token", token, "", True)


def examine_backends(requirements: Mapping[str, Requirement] = REQUIREMENTS) -> list[Line]:
    """Return a line for every backend.

    No single backend is needed, but a run needs one that trains and one that generates: a line says
    so if either is missing. A backend that is installed in an unsupported version counts as a
    mistake.
    """
    found = {kind: status(kind, need) for kind, need in requirements.items()}
    lines = [
        Line(
            f"backend {kind}",
            each.installed or "-",
            each.supported,
            each.ok,
            each.advice,
            needed=each.installed is not None,
        )
        for kind, each in found.items()
    ]
    for what, kinds in (("trains", TRAINING), ("generates", ENGINES)):
        if not any(found[kind].ok for kind in kinds if kind in found):
            advice = f"install one of {', '.join(kinds)}"
            lines.append(Line(f"a backend that {what}", "-", "", False, advice))
    return lines


def _open_sandbox() -> Sandbox:
    return Sandbox(workers=1)


def examine_sandbox(open_sandbox: Callable[[], Sandbox] = _open_sandbox) -> list[Line]:
    """Return a line for the level that programs of a policy run at, and for each that failed here.

    The levels are tried, with hostile programs, because no version tells what they are worth.

    Args:
        open_sandbox: opens a sandbox at the strongest level.
    """
    try:
        with open_sandbox() as sandbox:
            found, refused = sandbox.level, sandbox.refused
    except NoLevelError as error:
        return [Line("sandbox", "-", "", False, str(error), needed=False)]
    lines = [
        Line(f"sandbox level {level}", "-", "", False, f"{reason}: needs {NEEDS[level]}", False)
        for level, reason in refused.items()
    ]
    return [Line("sandbox", found, "", True), *lines]


def _lscpu() -> Line:
    lscpu = shutil.which("lscpu")
    advice = "" if lscpu else "vLLM on CPUs calls it: install util-linux"
    return Line("lscpu", lscpu or "-", "", lscpu is not None, advice, needed=False)
