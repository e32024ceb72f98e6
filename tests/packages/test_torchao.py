"""The optimizer `adamw_8bit` with the real torchao, which is not installed beside roll: peft would
import it in each process, which takes a second and writes warnings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages.interpreters import folder_with

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_contract_of_optimizers_holds_with_8_bits() -> None:
    wanted = (ROOT / "requirements/8bit.txt").read_text(encoding="utf-8")
    (requirement,) = re.findall(r"^torchao==\S+", wanted, re.M)
    path = os.pathsep.join([str(folder_with(requirement)), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["tests/contract/test_optimizers.py", "-k", "8bit or one_process"]
    told = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert told.returncode == 0, told.stdout[-4000:]
    assert "adamw_8bit" in told.stdout
