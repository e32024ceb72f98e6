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


HEAPS = """
import ctypes, threading
from roll.platform.allocator import keep_freed_memory
assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def work():
    libc.malloc(100)
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
libc.malloc_stats()
"""


def faults(mode: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, mode], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_freed_memory_is_not_fetched_again() -> None:
    assert faults("keep") * 10 < faults("default")


def test_threads_share_one_heap() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HEAPS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "Arena 0:" in done.stderr
    assert "Arena 1:" not in done.stderr
