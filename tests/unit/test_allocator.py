"""Freed memory that is kept needs not be fetched again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAULTS = """
import resource, sys
from roll.platform.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work():
    bytearray(b"x") * (64 << 20)
work()
before = faults()
for _ in range(5):
    work()
print(faults() - before)
"""


def faults(mode: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, mode], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_freed_memory_is_not_fetched_again() -> None:
    assert faults("keep") * 10 < faults("default")
