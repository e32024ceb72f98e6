"""`roll doctor`: what this machine has and what it lacks, with advice for each missing thing."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from rich.table import Table
from rich.text import Text

from roll.config.errors import ConfigError
from roll.config.sections.placement import ClusterConfig
from roll.distributed.device_layout import address_to_join
from roll.distributed.on_ray.token import HOW_TO_USE_A_TOKEN, found_token
from roll.envs.adapters.table import ADAPTERS, Adapter
from roll.platform.machine import this_machine
from roll.rewards.code.running.languages import LANGUAGES, places_of
from roll.rewards.code.running.programs import try_language
from roll.rewards.packages import PACKAGES, RewardPackage
from roll.sandbox import NoLevelError, Sandbox, SandboxError
from roll.sandbox.levels import NEEDS
from roll.strategy.available import REQUIREMENTS, Requirement, status

TRAINING = ("fsdp2", "deepspeed", "megatron")
ENGINES = ("vllm", "sglang", "hf")

RAY = Requirement(("ray",), SpecifierSet(">=2.60,<2.61"), "pip install 'ray>=2.60,<2.61'")


@dataclass(frozen=True, slots=True)
class Line:
    what: str
    found: str
    supported: str
    ok: bool
    advice: str = ""
    needed: bool = True
    """False if runs are possible without it; the advice then says how to get it."""


def table_of(lines: Iterable[Line]) -> Table:
    """Return a table with a row for each line."""
    table = Table("", "found", "supported", "")
    for line in lines:
        mark = Text("ok", "green") if line.ok else Text("missing", "red")
        told = Text(line.advice) if line.advice else mark
        table.add_row(*map(Text, (line.what, line.found, line.supported)), told)
    return table


def examine() -> list[Line]:
    """Return a line for Python, machine, Ray, every backend, lscpu, the sandbox, and every package
    of rewards and environments; imports no backend."""
    return [
        _python(),
        *_machine(),
        examine_ray(RAY),
        examine_token(),
        *examine_backends(),
        _lscpu(),
        *examine_sandbox(),
        *examine_languages(),
        *examine_reward_packages(),
        *examine_environment_packages(),
    ]


def _python() -> Line:
    """Return the line of the Python that runs; ok from 3.11 on."""
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


def examine_reward_packages(packages: Mapping[str, RewardPackage] = PACKAGES) -> list[Line]:
    """Return a line for every package that only some rewards need. A missing one, or another
    version, is named with the rewards that lack it; runs without these rewards are possible."""
    lines = []
    for name, package in packages.items():
        need = Requirement((name,), SpecifierSet(package.versions), "pip install 'roll[rewards]'")
        found = status(name, need)
        rewards = ", ".join(package.rewards)
        advice = "" if found.ok else f"{found.advice}; lacked by the rewards {rewards}"
        what = f"rewards: {name}"
        shown = found.installed or "-"
        lines.append(Line(what, shown, package.versions, found.ok, advice, needed=False))
    return lines


def examine_environment_packages(adapters: Mapping[str, Adapter] = ADAPTERS) -> list[Line]:
    """Return a line for every package of environments. A missing one is named with an environment
    that it has; another interpreter may have it (`environments.NAME.python`)."""
    lines = []
    examples: dict[str, list[str]] = {}
    for adapter in adapters.values():
        examples.setdefault(adapter.package, []).append(adapter.example)
    for package, envs in examples.items():
        found = status(package, Requirement((package,), SpecifierSet(), f"pip install {package}"))
        advice = "" if found.ok else f"{found.advice}; lacked by {', '.join(envs)}"
        shown = found.installed or "-"
        lines.append(Line(f"environments: {package}", shown, "", found.ok, advice, needed=False))
    return lines


def _open_sandbox() -> Sandbox:
    """Open a sandbox at the strongest level that works here; NoLevelError if none does."""
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


def examine_languages(names: Iterable[str] = LANGUAGES) -> list[Line]:
    """Return a line for each language of programs but Python: whether the sandbox builds and runs
    one."""
    return [_language(name) for name in names if name != "python"]


def _language(name: str) -> Line:
    """Return the line of one language: whether programs in it run in the sandbox, or why not."""
    try:
        with Sandbox("namespaces", workers=1, readable=places_of(name)) as sandbox:
            wrong = asyncio.run(try_language(sandbox, name))
    except (ConfigError, SandboxError) as error:
        wrong = str(error).splitlines()[0]
    return Line(f"programs in {name}", "-" if wrong else "run", "", not wrong, wrong, needed=False)


def _lscpu() -> Line:
    """Return the line of the program `lscpu`."""
    lscpu = shutil.which("lscpu")
    advice = "" if lscpu else "vLLM on CPUs calls it: install util-linux"
    return Line("lscpu", lscpu or "-", "", lscpu is not None, advice, needed=False)
