"""Interpreters with a package each, for packages that cannot be installed beside roll."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "roll-tests" / "packages"
INSTALL_TIMEOUT_S = 280
UV = str(Path(sys.executable).parent / "uv")
"""Makes an interpreter in a twentieth of pip's time."""


def interpreter_with(*requirements: str) -> str:
    """Return the path of an interpreter that has these packages; make it for the first test that
    wants it. Skip the test if they cannot be installed, and say why."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = CACHE / _name(*requirements, version)
    python = folder / "bin" / "python"
    _install(
        folder,
        [UV, "pip", "install", "--python", str(python), *requirements],
        before=lambda: venv.create(folder, clear=True),
    )
    return str(python)


def folder_with(requirement: str) -> Path:
    """Return a folder for `PYTHONPATH` with one package without its dependencies, for packages
    that others would import wherever they find them. Otherwise as `interpreter_with`."""
    folder = CACHE / _name("folder", requirement)
    command = [UV, "pip", "install", "--no-deps", "--python", sys.executable]
    command += ["--target", str(folder), requirement]
    _install(folder, command)
    return folder


def require_index() -> None:
    """Skip the test, and say why, where no package index can be asked; `pip` is on each."""
    command = [UV, "pip", "compile", "--quiet", "--refresh", "-"]
    try:
        done = subprocess.run(command, input="pip", capture_output=True, text=True, timeout=60)
        why = "" if done.returncode == 0 else done.stderr.strip()[-400:]
    except subprocess.TimeoutExpired:
        why = "no answer within 60 s"
    if why:
        pytest.skip(f"no package index can be asked here: {why}")


def _name(*parts: str) -> str:
    return "-".join(parts).replace("==", "-").replace("/", "-")


def _install(
    folder: Path, command: Sequence[str], before: Callable[[], None] = lambda: None
) -> None:
    """Run the command that fills a folder, unless it has been done; skip the test if it fails."""
    CACHE.mkdir(parents=True, exist_ok=True)
    stamp = folder / ".installed"
    with (CACHE / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists():
            return
        before()
        try:
            done = subprocess.run(
                [*command, "--quiet"],
                capture_output=True,
                text=True,
                timeout=INSTALL_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
            )
            why = done.stderr.strip()[-400:]
        except subprocess.TimeoutExpired:
            why = f"no end within {INSTALL_TIMEOUT_S} s"
        else:
            if done.returncode == 0:
                stamp.touch()
                return
        pytest.skip(f"{folder.name} cannot be installed here: {why}")
