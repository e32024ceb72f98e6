"""The packages for GPUs, resolved by uv for a machine with NVIDIA GPUs. Nothing is installed: uv
reads what the wheels say of themselves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages.interpreters import require_index

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements/cuda.lock"
UV = str(Path(sys.executable).parent / "uv")

pytestmark = pytest.mark.slow


def compile_command() -> list[str]:
    """Arguments of the command in the head of the list, which makes it."""
    head = [line.lstrip("# ") for line in LOCK.read_text().splitlines() if line.startswith("#")]
    return " ".join(head).partition("uv pip compile")[2].split()


def resolved() -> dict[str, str]:
    """Package -> version, as uv resolves the requirements with the versions of the list; fails with
    what uv says."""
    require_index()
    told = subprocess.run(
        [UV, "pip", "compile", *compile_command(), "--constraint", str(LOCK)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert told.returncode == 0, told.stderr[-4000:]
    return dict(re.findall(r"^([\w.-]+)==(\S+)", told.stdout, re.MULTILINE))


def pinned() -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", LOCK.read_text(), re.MULTILINE))


def test_the_list_of_packages_for_gpus_is_complete_and_fits_together() -> None:
    """Each wheel of the list exists for Linux, and wants no other version, and none besides."""
    assert resolved() == pinned()
