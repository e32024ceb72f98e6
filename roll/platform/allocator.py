"""How this process's C library treats memory that is freed."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
"""Numbers from glibc's malloc.h."""
VARIABLES = {
    "MALLOC_TRIM_THRESHOLD_": M_TRIM_THRESHOLD,
    "MALLOC_MMAP_MAX_": M_MMAP_MAX,
    "MALLOC_ARENA_MAX": M_ARENA_MAX,
}
"""What glibc reads when a program is loaded."""
NEVER = 2**31 - 1
"""More than any block, as far as an argument of `mallopt` can say."""


def keep_freed_memory() -> bool:
    """Keep what is freed for the next allocation instead of giving it back to the system.

    A step's tensors are large and short-lived. By default each is given back when it is freed and
    fetched again, page by page, for the next one, which takes longer than the arithmetic on them.
    The price: the process stays as large as it ever was.

    Returns:
        False where the C library has no such setting (it is not glibc).
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    return bool(library.mallopt(M_MMAP_MAX, 0) and library.mallopt(M_TRIM_THRESHOLD, NEVER))


def set_from(environ: Mapping[str, str]) -> None:
    """Do what `VARIABLES` ask for, in a process that was there before they were set."""
    library = ctypes.CDLL(None)
    for name, number in VARIABLES.items():
        value = environ.get(name, "")
        if value.isdigit() and hasattr(library, "mallopt"):
            library.mallopt(number, min(int(value), NEVER))
