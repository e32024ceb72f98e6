"""Parts of a source by hash: a row keeps its part when other rows come, go or move."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from roll.core.errors import DataError
from roll.core.types import Message


def lies_in(part: tuple[float, float], messages: Sequence[Message]) -> bool:
    """Return whether a row belongs to a part of its source.

    What decides is the text before the first turn of the assistant, without system messages; or
    that turn, if nothing is before it. So all rows with one question are in one part.

    Args:
        part: half-open range within 0 to 1.
        messages: prompt or conversation of the row.
    """
    said = [message for message in messages if message.role != "system"]
    first = next((i for i, each in enumerate(said) if each.role == "assistant"), len(said))
    asked = said[:first] or said[:1]
    return _hashes_into(part, "\0".join(each.content for each in asked))


def counts_in(part: tuple[float, float], place: str) -> bool:
    """Return whether a row that the function of its source leaves out is counted in a part. Nobody
    knows its question, so its file and line decide; it is counted in one of several parts.

    Args:
        place: file and line of the row.
    """
    return _hashes_into(part, place)


def no_rows(path: str, part: tuple[float, float] | None, rows: int) -> DataError:
    """Return the error for a source, or a part of it, without rows.

    Args:
        path: file of the source.
        rows: number of rows of the whole source.
    """
    if part is None or not rows:
        return DataError(f"{path}: no rows; a source needs at least one")
    return DataError(f"{path}: none of {rows} rows lies in part {list(part)}; widen it")


def _hashes_into(part: tuple[float, float], text: str) -> bool:
    place = int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")
    return part[0] <= place / 2**64 < part[1]
