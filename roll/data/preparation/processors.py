"""Functions of the user that change rows, leave them out, or make several of one."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from roll.config.sections.data import FileConfig
from roll.config.user_code.import_path import load_object
from roll.core.errors import ConfigError, RowError
from roll.data.columns import RawRow, show

NoteDropped = Callable[[str, str], None]
"""Function that gets the reason and the place of a row that is left out."""


def processed(rows: Iterable[RawRow], source: FileConfig, note: NoteDropped) -> Iterator[RawRow]:
    """Yield what the function of the source makes of its rows, or the rows if it has none.

    A row on which the function fails, or of which it makes something else than rows, holds the
    error, which names the line of the user that failed.

    Args:
        rows: rows as they were read.
        note: called for each row that the function leaves out.

    Raises:
        ConfigError: there is no such function.
    """
    if source.fn is None:
        yield from rows
        return
    function = load_object(source.fn)
    if not callable(function):
        raise ConfigError(f"fn: {source.fn!r} is no function but {type(function).__name__}")
    for row in rows:
        try:
            made = _result(function, source.fn, row)
        except RowError as error:
            yield RawRow(row.place, error)
            continue
        if not made:
            note(f"no row from {source.fn}", row.place)
        for number, values in enumerate(made):
            place = row.place if len(made) == 1 else f"{row.place} (row {number} of {source.fn})"
            yield RawRow(place, values)


def _result(function: Callable[..., Any], name: str, row: RawRow) -> list[Mapping[str, Any]]:
    """Return the rows that a function makes of one; RowError if it fails, returns something else,
    or if the row could not be read."""
    values = dict(row.values)
    try:
        made = function(values)
    except Exception as error:
        raise RowError(
            f"{row.place}: {name} raised {type(error).__name__}: {error}{_line(error, function)}"
        ) from error
    found = [] if made is None else made if isinstance(made, list | tuple) else [made]
    for each in found:
        if not isinstance(each, Mapping):
            raise RowError(
                f"{row.place}: {name} must return a row (a dict), None or a list of rows, found "
                f"{show(each)}"
            )
    return list(found)


def _line(error: Exception, function: Callable[..., Any]) -> str:
    """Return the innermost line of the function's file that the error went through; empty if there
    is none, as for a function in C."""
    code = getattr(function, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    if not own:
        return ""
    at = own[-1]
    text = linecache.getline(at.filename, at.lineno or 0).strip()
    return f" ({at.filename}:{at.lineno}: {text})"
