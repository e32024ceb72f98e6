"""Settings of glibc's memory allocator: what happens to memory that the process frees."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
"""Numbers of `mallopt` parameters, from glibc's malloc.h."""
VARIABLES = {
    "MALLOC_TRIM_THRESHOLD_": M_TRIM_THRESHOLD,
    "MALLOC_MMAP_MAX_": M_MMAP_MAX,
    "MALLOC_ARENA_MAX": M_ARENA_MAX,
}
"""Environment variables that glibc reads when a program is loaded -> number of the `mallopt`
parameter with the same effect."""
NEVER = 2**31 - 1
"""Largest value of a `mallopt` parameter, in bytes: memory is never given back below this size."""


def keep_freed_memory() -> bool:
    """Keep freed memory, in one heap for all threads, for the next allocation instead of giving it
    back to the system at once.

    The tensors of a step are large and short-lived. By default, their memory is given back to the
    system when they are freed, and requested again, page by page, for the next tensors. That takes
    longer than the arithmetic on the tensors. The drawback of keeping the memory: the process never
    becomes smaller, unless `give_back_each_minute` runs in it. With a heap per thread, each heap
    would keep its own largest size.

    Returns:
        True if the settings were accepted; False if the C library is not glibc or refused them.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    wanted = {M_ARENA_MAX: 1, M_MMAP_MAX: 0, M_TRIM_THRESHOLD: NEVER}
    return all(library.mallopt(number, value) for number, value in wanted.items())


def set_from(environ: Mapping[str, str]) -> None:
    """Apply the settings of `VARIABLES` that are in `environ` to this process, which was loaded
    before these variables were set. Values that are not numbers are ignored."""
    library = ctypes.CDLL(None)
    for name, number in VARIABLES.items():
        value = environ.get(name, "")
        if value.isdecimal() and hasattr(library, "mallopt"):
            library.mallopt(number, min(int(value), NEVER))


def give_back_freed_memory() -> None:
    """Give all freed pages of this process back to the system; nothing without glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def give_back_each_minute(every_s: float = 60.0) -> None:
    """Start a daemon thread that gives freed memory back every `every_s` seconds. A second call
    starts a second thread.

    A process whose largest step is rare would otherwise keep the memory of that step, and, because
    blocks of different sizes lie between each other in the heap, take a little more with each such
    step. To fetch 100 MB again takes about 60 ms.
    """

    def run() -> None:
        while not over.wait(every_s):
            give_back_freed_memory()

    over = threading.Event()
    threading.Thread(target=run, name="roll-memory", daemon=True).start()
