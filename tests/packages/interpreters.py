"""Interpreters with a package each, for packages that cannot be installed beside roll."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "roll-tests" / "packages"
INSTALL_TIMEOUT_S = 280


def interpreter_with(*requirements: str) -> str:
    """Return the path of an interpreter that has these packages; make it for the first test that
    wants it. Skip the test if they cannot be installed, and say why."""
    CACHE.mkdir(parents=True, exist_ok=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = "-".join((*requirements, version)).replace("==", "-").replace("/", "-")
    folder, stamp = CACHE / name, CACHE / name / ".installed"
    python = folder / "bin" / "python"
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists():
            venv.create(folder, with_pip=True, clear=True)
            command = [str(python), "-m", "pip", "install", "-q", "--no-input", *requirements]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S
                )
                why = done.stderr.strip()[-400:]
            except subprocess.TimeoutExpired:
                why = f"no end within {INSTALL_TIMEOUT_S} s"
            else:
                if done.returncode == 0:
                    stamp.touch()
        if not stamp.exists():
            pytest.skip(f"{', '.join(requirements)} cannot be installed here: {why}")
    return str(python)
