"""The tests that need GPUs are found and imported where there is none, and skipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_all_of_them_are_imported_and_say_how_many_gpus_they_need() -> None:
    """One that does not say it would run, and fail, on a machine without."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-rs", "--no-fold-skipped"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    told = re.findall(r"^SKIPPED (tests/gpu/(?:\w+/)*(\w+)\.py)::", done.stdout, re.MULTILINE)
    assert {module for _, module in told} == {
        path.stem for path in (ROOT / "tests/gpu").rglob("test_*.py")
    }
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"\d+ skipped in .*", last), last
