"""Become an ordinary user in a test's process, though the interpreter may lie in root's folder."""

from __future__ import annotations

import os
import sys
import tempfile

from roll.sandbox.worker.inside import linux

ORDINARY = 23456


def become_ordinary() -> None:
    """Give up root for good. The interpreter stays where it is, for this process and its own."""
    prefix = os.path.realpath(sys.base_prefix)
    closed = _first_closed(prefix)
    if closed is not None:
        linux.unshare(linux.NEW_NS)
        linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        held = os.open(prefix, os.O_PATH)
        linux.mount("none", closed, "tmpfs", 0, "mode=755")
        os.makedirs(prefix)
        linux.mount(f"/proc/self/fd/{held}", prefix, None, linux.MS_BIND | linux.MS_REC)
        os.close(held)
    os.setgroups([])
    os.setresgid(ORDINARY, ORDINARY, ORDINARY)
    os.setresuid(ORDINARY, ORDINARY, ORDINARY)
    tempfile.tempdir = "/tmp"


def _first_closed(path: str) -> str | None:
    """Return the first folder on the way to `path` that others may not enter."""
    parts = path.strip("/").split("/")
    for n in range(1, len(parts) + 1):
        folder = "/" + "/".join(parts[:n])
        if not os.stat(folder).st_mode & 0o001:
            return folder
    return None
