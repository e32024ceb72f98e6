"""Replacement of a file that others may read, or that a power failure may hit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, text: str) -> None:
    """Write a text to a file, which has its old content or all of the new one at any time.

    Raises:
        OSError: the disk is full, or another error of the disk; `path` stays as it was.
    """
    with replaced(path) as file:
        file.write(text.encode())


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Open a file whose content becomes that of `path` when the block ends without an error; else
    `path` stays as it was.

    The content goes to a hidden file, is forced to disk, and only then gets the name: a name that
    comes to disk before its content would be that of an empty file after a power failure.

    Raises:
        OSError: the disk is full, or another error of the disk.
    """
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise
