"""The level `landlock`: a job may read the interpreter's folders and its own, and write nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterable

from . import linux

# Rights on files (linux/landlock.h), and how many of them each version of landlock knows.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1, 2, 4, 8, 1 << 14
_FILE_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_NETWORK_RIGHTS, _SCOPES = 0b11, 0b11  # bind and connect of TCP; abstract sockets and signals

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def open_places(places: Iterable[str]) -> list[tuple[int, int]]:
    """Return (descriptor, rights) of the folders and files that jobs may read; skips absent ones.

    Called before the user changes, so that places count which only the old user can enter.
    """
    found = []
    for place in places:
        with contextlib.suppress(FileNotFoundError):
            is_folder = os.path.isdir(place)
            rights = READ_FILE | (READ_DIR if is_folder else 0)
            found.append((_open(place), rights))
    for device in DEVICES:
        with contextlib.suppress(FileNotFoundError):
            rights = READ_FILE | WRITE_FILE | TRUNCATE
            found.append((_open(device), rights))
    return found


def _open(place: str) -> int:
    """Return a descriptor of a place, away from the numbers that a job gives to its own."""
    descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
    away = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 16)
    os.close(descriptor)
    return away


def restrict(places: Iterable[tuple[int, int]], abi: int) -> None:
    """Allow this process only what `places` says, and no network; forbid all else of landlock's.

    Args:
        places: pairs of `open_places`.
        abi: version of landlock.
    """
    files = (1 << _FILE_RIGHTS_BY_ABI[min(abi, max(_FILE_RIGHTS_BY_ABI))]) - 1
    attributes = struct.pack("<Q", files)
    if abi >= 4:
        attributes += struct.pack("<Q", _NETWORK_RIGHTS)
    if abi >= 6:
        attributes += struct.pack("<Q", _SCOPES)
    ruleset = linux.landlock_ruleset(attributes)
    for place, rights in places:
        linux.landlock_allow(ruleset, place, rights & files)
    linux.landlock_restrict(ruleset)
    os.close(ruleset)
