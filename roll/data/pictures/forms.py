"""Forms in which rows hold pictures: bytes, paths, data URLs, base64, Hugging Face's columns."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from roll.core.errors import PictureError, RowError
from roll.data.pictures.decoding import png, upright_size
from roll.data.pictures.picture import Picture
from roll.data.spool import put_bytes

FORMS = (
    "bytes, a path, a file: or data: URL, base64, {bytes, path} as Hugging Face has it, or a "
    "picture of Pillow"
)
SHORTEST_BASE64 = 64
"""Number of characters from which a text without a dot may be base64: no picture is shorter, and
the name of a picture has a dot."""
SHOWN = 60
"""Longest part of a value in a message, in characters."""


def pictures_of(value: Any, where: str, folder: Path) -> tuple[Picture, ...]:
    """Return the pictures in a column: one, several in a list, or none (null).

    Args:
        where: file, row and column, for messages.
        folder: folder of the file, to which paths are relative.

    Raises:
        DataError: a value is of no known form, or a URL of a network. Pictures that cannot be read
            raise nothing: they say so themselves.
    """
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        value = [value]
    return tuple(
        picture_of(each, f"{where}, picture {number}", folder)
        for number, each in enumerate(value, start=1)
    )


def picture_of(value: Any, name: str, folder: Path) -> Picture:
    """Return one picture of a row; the errors are those of `pictures_of`.

    Args:
        value: a picture in one of the known forms.
        name: file, row and number of the picture, for messages.
        folder: folder of the file, to which paths are relative.
    """
    if isinstance(value, Mapping) and {"bytes", "path"} & value.keys():
        found = value.get("bytes")
        value = value.get("path") if found is None else found
    if isinstance(value, bytes):
        return _spooled(value, name)
    if isinstance(value, str):
        return _of_text(value, name, folder)
    if type(value).__module__.split(".")[0] == "PIL":
        return _spooled(png(value), name)
    if value is None:
        return Picture(name, "", "", wrong="there is nothing (null)")
    raise RowError(f"{name} is of type {type(value).__name__}; a picture is {FORMS}")


def _of_text(text: str, name: str, folder: Path) -> Picture:
    """Return a picture of a text: URL, base64 or path; DataError for a URL of a network."""
    scheme = text[:16].partition(":")[0].lower()
    if scheme in ("http", "https", "ftp", "s3", "gs", "hf"):
        raise RowError(
            f"{name} is a {scheme} URL ({text[:SHOWN]}); no picture is taken from a network during "
            "a run. Download the pictures before, and give their paths"
        )
    if scheme == "data":
        return _of_data_url(text, name)
    if scheme == "file":
        text = unquote(urlsplit(text).path)
    elif len(text) >= SHORTEST_BASE64 and "." not in text:
        try:
            return _spooled(base64.b64decode(re.sub(r"\s", "", text), validate=True), name)
        except ValueError:  # also for other letters than those of ASCII
            pass  # a long path
    return _of_file(text, name, folder)


def _of_data_url(text: str, name: str) -> Picture:
    """Return the picture of a data URL (RFC 2397)."""
    head, comma, body = text.partition(",")
    try:
        if not comma:
            raise ValueError("a data: URL without a comma")
        is_base64 = head.lower().endswith(";base64")
        data = base64.b64decode(body, validate=True) if is_base64 else unquote_to_bytes(body)
    except ValueError as error:  # that of base64 is one
        return Picture(name, "", _digest(text.encode()), wrong=f"a damaged data: URL ({error})")
    return _spooled(data, name)


def _of_file(text: str, name: str, folder: Path) -> Picture:
    """Return the picture of a file, which stays where it is."""
    path = folder / Path(text).expanduser()
    name = f"{name} ({path})"
    try:
        # The path as the row has it: a run that is started from elsewhere has the same data.
        identity = f"{text}:{path.stat().st_size}"
        height, width = upright_size(str(path))
    except (OSError, ValueError, PictureError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        return Picture(name, str(path), text, wrong=reason or str(error))
    return Picture(name, str(path.absolute()), identity, height, width)


def _spooled(data: bytes, name: str) -> Picture:
    """Return the picture of encoded bytes, which leave memory."""
    digest = _digest(data)
    try:
        height, width = upright_size(data)
    except PictureError as error:
        return Picture(name, "", digest, wrong=str(error))
    return Picture(name, put_bytes(data), digest, height, width)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()
