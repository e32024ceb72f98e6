"""How this process's C library treats memory that is freed."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Numbers from glibc's malloc.h."""


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
    never = 2**31 - 1
    return bool(library.mallopt(M_MMAP_MAX, 0) and library.mallopt(M_TRIM_THRESHOLD, never))
