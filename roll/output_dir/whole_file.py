"""Replacement of a file that others may read, or that a power failure may hit."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Write a text to a file, which has its old content or all of the new one at any time.

    The text goes to another file, is forced to disk, and only then gets the name: a name that comes
    to disk before its content would be that of an empty file after a power failure.

    Raises:
        OSError: the disk is full, or another error of the disk; `path` stays as it was.
    """
    aside = path.with_name(f"{path.name}.tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise
