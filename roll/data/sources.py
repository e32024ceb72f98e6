"""Reading and checking of sources; an error names the file, the line and what to do.

`read_source` reads all rows. `check_source` looks only at existence, first row and columns (more
rows if the first has a mistake), and imports neither torch nor datasets, so that `roll check`
answers at once.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from roll.config.errors import nearest
from roll.config.sections.data import FileConfig, PreferenceSource, SourceConfig, TextSource
from roll.config.sections.environment import TaskSource
from roll.core.errors import DataError, NotMadeYetError, RowError
from roll.core.hub import has_hub_form, may_be_on_hub
from roll.data.chat.conversations import DialogueRow, map_preference, map_text
from roll.data.chat.unknown_text import UnknownText
from roll.data.columns import PromptRow, RawRow, map_row, map_task, require_columns
from roll.data.readers import FILE_READERS, parquet_columns, read_disk, read_hub
from roll.data.store.making import mapped
from roll.data.store.tally import Tally

log = logging.getLogger(__name__)

S = TypeVar("S", bound=FileConfig)
R = TypeVar("R")

FIRST_ROWS = 10_000
"""Number of rows that are read to tell mistakes, where the quick check finds one in the first."""
DISK_SPLITS = "dataset_dict.json"
"""File in a folder of `save_to_disk` that has splits."""
ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
}


def map_any(row: RawRow, source: FileConfig) -> PromptRow | DialogueRow:
    """Convert a row by the columns and the kind of its source: prompts, texts or preferences.

    Raises:
        DataError: a column is missing or holds the wrong type.
        TypeError: the source is of no known kind.
    """
    match source:
        case TaskSource():
            return map_task(row, source)
        case SourceConfig():
            return map_row(row, source)
        case TextSource():
            return map_text(row, source)
        case PreferenceSource():
            return map_preference(row, source)
    raise TypeError(f"no rows are known of {type(source).__name__}")


def read_source(source: S, map_one: Callable[[RawRow, S], R]) -> list[R]:
    """Read all rows of a source, or the first `source.limit`, in file order.

    Args:
        source: the source to read.
        map_one: function that converts a raw row by the columns of its source.

    Raises:
        NotMadeYetError: the file does not exist, and `made_by` names the command that makes it.
        DataError: anything else is wrong with the file, a row or a column.
    """
    tally = Tally(UnknownText(None))
    rows = [row for _, row in mapped(raw_rows(source), source, map_one, tally)]
    tally.refuse_mistakes(source)
    if tally.dropped.counts:
        log.warning("source %s: rows left out: %s", source.path, tally.dropped)
    if not rows:
        raise DataError(f"{source.path}: no rows; a source needs at least one")
    return rows


def check_source(source: FileConfig) -> None:
    """Check that a source exists and that its first row has the configured columns.

    For a hub dataset, only the form of its name is checked. For a folder of `save_to_disk`, only
    its files are checked.

    Raises:
        NotMadeYetError, DataError: see `read_source`.
    """
    form = resolve_format(source)
    path = local_path(source)
    if form == "hub":
        return
    if form == "disk":
        _check_disk(path, source.split)
        return
    if form == "parquet":
        names, num_rows = parquet_columns(path)
        if source.fn is None:  # its columns are those that the function returns
            require_columns(names, source, str(path))
        if num_rows:
            return
    else:
        for row in itertools.islice(FILE_READERS[form](path), 1):
            if source.fn is None:
                _check_row(row, source)
            elif isinstance(row.read, RowError):
                raise row.read
            return
    raise DataError(f"{source.path}: no rows; a source needs at least one")


def _check_row(row: RawRow, source: FileConfig) -> None:
    """Check the first row of a source without a function. If it has a mistake, others have some,
    too, so that the error tells of the first rows.

    Raises:
        DataError: see `read_source`.
    """
    try:
        map_any(row, source)
    except RowError:
        few = min(source.limit or FIRST_ROWS, FIRST_ROWS)
        read_source(source.model_copy(update={"limit": few}), map_any)
        raise


def resolve_format(source: FileConfig) -> str:
    """Return the format of a source, with `auto` resolved; check that a local path exists.

    Raises:
        NotMadeYetError, DataError: see `read_source`.
    """
    path = local_path(source)
    form: str = source.format
    if form == "hub" or (form == "auto" and not path.exists() and _names_hub(source)):
        if not ("/" in source.path and has_hub_form(source.path)):
            raise DataError(f"{source.path!r} is no hub dataset; its form is `org/name`")
        return "hub"
    if not path.exists():
        raise _missing(source, path)
    if form == "auto":
        form = "disk" if path.is_dir() else ENDINGS.get(path.suffix.lower(), "auto")
    if form == "auto":
        raise DataError(
            f"{source.path}: unknown ending {path.suffix!r} (known: {', '.join(ENDINGS)}); "
            "set `format` of this source"
        )
    if path.is_dir() != (form == "disk"):
        kind = "folder" if path.is_dir() else "file"
        raise DataError(f"{source.path}: is a {kind}, but `format: {form}` expects the other")
    _refuse_hub_keys(source, has_splits=form == "disk" and (path / DISK_SPLITS).exists())
    return form


def _refuse_hub_keys(source: FileConfig, *, has_splits: bool) -> None:
    """Refuse keys that choose a part of a hub dataset, for a local source, of which all rows would
    be read.

    Args:
        has_splits: True for a folder of several splits, of which `split` chooses one.

    Raises:
        DataError: the source has such a key.
    """
    for key in source.changed("subset", *(() if has_splits else ("split",))):
        default = type(source).model_fields[key].get_default()
        raise DataError(
            f"{source.path}: `{key}: {getattr(source, key)}` of this source chooses a part of a "
            f"dataset of the hub, and this local data has no {key}s, so all its rows would be "
            f"read; drop `{key}` (which is then {default or 'null'}), and give the path of the "
            "rows that you mean"
        )


def raw_rows(source: FileConfig) -> Iterator[RawRow]:
    """Return an iterator over the raw rows of a source from the hub, a folder or a file: at most
    the first `limit`. Errors are those of `resolve_format` and of the reader."""
    form = resolve_format(source)
    path = local_path(source)
    if form == "hub":
        rows = read_hub(source)
    elif form == "disk":
        rows = read_disk(path, source.split)
    else:
        rows = FILE_READERS[form](path)
    return itertools.islice(rows, source.limit)


def local_path(source: FileConfig) -> Path:
    """Return the path of the source, with `~` replaced by the home folder."""
    return Path(source.path).expanduser()


def _names_hub(source: FileConfig) -> bool:
    """Return True if the path may name a hub dataset: `org/name` without a known file ending.

    A source with `made_by` is a local file, even if the file does not exist yet.
    """
    is_name = "/" in source.path and may_be_on_hub(source.path)
    return is_name and Path(source.path).suffix.lower() not in ENDINGS and source.made_by is None


def _missing(source: FileConfig, path: Path) -> DataError:
    """Return the error for a path that does not exist: with the command that makes it, or a similar
    name in its folder."""
    if source.made_by is not None:
        return NotMadeYetError(
            f"{source.path}: no such file or folder yet; make it with: {source.made_by}"
        )
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    where = f" in {path.parent.absolute()}" if siblings else f"; {path.parent} does not exist"
    if not siblings and path.parent.is_dir():
        where = f"; {path.parent.absolute()} is empty"
    return DataError(f"{source.path}: no such file or folder{where}{nearest(path.name, siblings)}")


def _check_disk(path: Path, split: str) -> None:
    """Check a `save_to_disk` folder by the files that every such folder has.

    Raises:
        DataError: these files or the split are missing.
    """
    if (path / DISK_SPLITS).exists():
        if not (path / split).is_dir():
            have = sorted(p.name for p in path.iterdir() if p.is_dir())
            raise DataError(
                f"{path}: no split {split!r}{nearest(split, have)} (splits: {', '.join(have)})"
            )
    elif not (path / "dataset_info.json").exists():
        raise DataError(
            f"{path}: not a folder written by `datasets.save_to_disk` (no dataset_info.json); "
            "give the path of a file"
        )
