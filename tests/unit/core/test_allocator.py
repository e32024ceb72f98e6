"""Freed memory that is kept needs not be fetched again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
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

HOLES = """
import ctypes, time
from pathlib import Path
from roll.platform.allocator import give_back_each_minute, keep_freed_memory
assert keep_freed_memory()
def rss_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = (ctypes.c_size_t,)
libc.free.argtypes = (ctypes.c_void_p,)
before_mb = rss_mb()
blocks = [libc.malloc(size) for _ in range(100) for size in (1 << 20, 64)]
for block in blocks:
    ctypes.memset(block, 1, 64 if block in blocks[1::2] else 1 << 20)
for block in blocks[::2]:
    libc.free(block)
kept_mb = rss_mb() - before_mb
give_back_each_minute(every_s=0.05)
for _ in range(100):
    time.sleep(0.1)
    if rss_mb() - before_mb < 10:
        break
print(kept_mb, rss_mb() - before_mb)
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


def test_free_memory_between_blocks_in_use_is_given_back_after_a_while() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    kept_mb, left_mb = map(float, done.stdout.split())
    assert kept_mb > 90
    assert left_mb < 10
