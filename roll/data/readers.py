"""Readers of raw rows, one per file format; each row holds the place that it came from.

Every reader is a generator, so that a quick check can read only the first row. `datasets` and
`pyarrow` are imported inside the reader that needs them, so that `roll check` starts fast.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.config.errors import nearest
from roll.config.sections.data import FileConfig
from roll.core.errors import DataError, RowError
from roll.data.columns import RawRow

BATCH_BYTES = 1 << 26
"""Bytes of a Parquet file that are in memory at a time, about; they may be compressed in it."""
CHUNK_BYTES = 1 << 20
"""Bytes of a file, about, whose rows are tokenized at a time where rows are kept on disk."""
PICTURE_ROWS = 64
"""Number of rows with pictures of a dataset that are in memory at a time."""
CSV_FIELD_LIMIT = 2**31 - 1
"""Largest number of characters in a CSV field; the default of `csv`, 131072, is too low for long
documents."""


def read_jsonl(path: Path) -> Iterator[RawRow]:
    """Yield one row per line, each a JSON object; blank lines are skipped. A line that is not UTF-8
    or not a JSON object becomes a row that holds the error."""
    with path.open("rb") as file:
        yield from parsed_lines(path, file, first=1)


def parsed_lines(path: Path, lines: Iterable[bytes], first: int) -> Iterator[RawRow]:
    """Yield one row per line of a JSONL file, as `read_jsonl` does.

    Args:
        lines: consecutive lines of the file.
        first: number of the first of them; the file begins with line 1.
    """
    for number, raw in enumerate(lines, first):
        place = f"{path}:{number}"
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            told = f"not UTF-8 at byte {error.start} of the line; save the file as UTF-8"
            yield RawRow(place, RowError(f"{place}: {told}"))
            continue
        if line:
            yield RawRow(place, _object_of_line(line, place))


def read_json(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a file that holds one JSON list of objects. An item that is none becomes a
    row that holds the error.

    Raises:
        DataError: the file is not UTF-8 or not such a list.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows = json.loads(text, object_pairs_hook=_with_each_key_once)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except (json.JSONDecodeError, RecursionError) as error:
        hint = "; if it holds one object per line, set `format: jsonl`"
        raise DataError(f"{path}: not valid JSON: {error}{hint}") from None
    except ValueError as error:  # a key twice, or a number with too many digits
        raise DataError(f"{path}: JSON that cannot be read: {error}") from None
    if not isinstance(rows, list):
        raise DataError(
            f"{path}: must hold a list of objects, found {type(rows).__name__}; "
            "if it holds one object per line, set `format: jsonl`"
        )
    for number, row in enumerate(rows):
        place = f"{path}: row {number}"
        yield RawRow(place, _object(row, place))


def read_csv(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a file of comma-separated values with a header line; every value is text. A
    row that has not as many values as the header holds the error.

    Raises:
        DataError: the file is not UTF-8 or not valid CSV.
    """
    csv.field_size_limit(CSV_FIELD_LIMIT)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        row_number = 0
        try:
            names = Counter(filter(None, reader.fieldnames or ()))
            if twice := [name for name, count in names.items() if count > 1]:
                raise DataError(
                    f"{path}: the header has the column {twice[0]!r:.60} more than once; rename one"
                )
            for row_number, row in enumerate(reader):
                place = f"{path}: row {row_number} (line {reader.line_num})"
                width = len(reader.fieldnames or ())
                if None in row or None in row.values():
                    told = f"{place}: the header has {width} columns, this row has not"
                    yield RawRow(place, RowError(told))
                else:
                    yield RawRow(place, row)
        except UnicodeDecodeError:
            raise DataError(f"{path}: not UTF-8 after row {row_number}; save it as UTF-8") from None
        except csv.Error as error:
            raise DataError(f"{path}: line {reader.line_num}: {error}") from None


def read_parquet(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a Parquet file, which is read batch by batch.

    Raises:
        DataError: the file is not a readable Parquet file.
    """
    number = 0
    for batch in parquet_batches(path, BATCH_BYTES):
        for row in batch.to_pylist():
            yield RawRow(f"{path}: row {number}", row)
            number += 1


def parquet_batches(path: Path, num_bytes: int) -> Iterator[Any]:
    """Yield the rows of a Parquet file as Arrow's record batches of about `num_bytes` bytes.

    Raises:
        DataError: the file is not a readable Parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            size = sum(
                file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)
            )
            rows = num_bytes * max(1, file.metadata.num_rows) // max(1, size)
            yield from file.iter_batches(batch_size=max(1, min(rows, 1 << 16)))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from None


def parquet_columns(path: Path) -> tuple[list[str], int]:
    """Return the names of the columns and the number of rows; only the file's footer is read.

    Raises:
        DataError: the file is not a readable Parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            return list(file.schema_arrow.names), file.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from None


def read_disk(path: Path, split: str) -> Iterator[RawRow]:
    """Yield the rows of a folder written by `datasets.save_to_disk`.

    The folder holds one dataset, or a dict of splits, of which `split` is read.

    Raises:
        DataError: the folder was not written so, or it has no such split.
    """
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: not a folder written by `datasets.save_to_disk`: {error}"
        ) from None
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            have = sorted(loaded)
            raise DataError(
                f"{path}: no split {split!r}{nearest(split, have)} (splits: {', '.join(have)})"
            )
        loaded = loaded[split]
    for number, row in enumerate(_rows(loaded)):
        yield RawRow(f"{path}: row {number}", row)


def read_hub(source: FileConfig) -> Iterator[RawRow]:
    """Yield the rows of a Hugging Face hub dataset, downloaded or from the local cache.

    Args:
        source: source whose `path`, `subset` and `split` name the dataset; its `limit` is not read.

    Raises:
        DataError: the dataset cannot be loaded.
    """
    for number, row in enumerate(_rows(_load_hub(source))):
        yield RawRow(f"hub dataset {_hub_name(source)}: row {number}", row)


def hub_files(source: FileConfig) -> list[Path]:
    """Return the files in which the local cache holds a dataset of the Hugging Face hub; DataError
    as in `read_hub`."""
    return [Path(each["filename"]) for each in _load_hub(source).cache_files]


def _hub_name(source: FileConfig) -> str:
    return source.path + (f" ({source.subset})" if source.subset else "")


def _load_hub(source: FileConfig) -> Any:
    """Return a dataset of the Hugging Face hub; DataError as in `read_hub`."""
    import datasets

    try:
        return datasets.load_dataset(source.path, source.subset, split=source.split)
    except (OSError, ValueError, RuntimeError) as error:
        first_line = (str(error).strip().splitlines() or ["no details"])[0]
        raise DataError(
            f"hub dataset {_hub_name(source)}, split {source.split!r}: cannot be loaded "
            f"({type(error).__name__}: {first_line}); check the name, `subset`, `split` "
            "and the network, or download it before and give the path of a file or folder"
        ) from error


FILE_READERS: dict[str, Callable[[Path], Iterator[RawRow]]] = {
    "jsonl": read_jsonl,
    "json": read_json,
    "csv": read_csv,
    "parquet": read_parquet,
}


def _rows(dataset: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a dataset of Hugging Face. Its pictures stay encoded, as {bytes, path}:
    `datasets` would decode each of them at each reading."""
    if not _has_pictures(dataset.features):
        yield from dataset
        return
    for batch in dataset.with_format("arrow").iter(PICTURE_ROWS):
        yield from batch.to_pylist()


def _has_pictures(feature: Any) -> bool:
    """Return whether a feature of `datasets` holds pictures, itself or in it."""
    import datasets

    if isinstance(feature, Mapping):
        return any(map(_has_pictures, feature.values()))
    if isinstance(feature, datasets.List | datasets.LargeList):
        return _has_pictures(feature.feature)
    return isinstance(feature, datasets.Image)


def _object_of_line(line: str, place: str) -> dict[str, Any] | RowError:
    """Return the JSON object of a line; an error, with place and column, if it is invalid, nested
    too deeply or no object."""
    try:
        return _object(json.loads(line, object_pairs_hook=_with_each_key_once), place)
    except json.JSONDecodeError as error:
        around = line[max(0, error.pos - 20) : error.pos + 20]
        return RowError(f"{place}: not valid JSON: {error.msg} at column {error.colno}: {around!r}")
    except RecursionError:
        return RowError(f"{place}: JSON nested too deeply")
    except ValueError as error:  # a key twice, or a number with too many digits
        return RowError(f"{place}: JSON that cannot be read: {error}")


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object of its keys and values.

    Raises:
        ValueError: a key comes twice: only one of its values could be taken.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        twice = [name for name, count in names.items() if count > 1]
        raise ValueError(f"the key {twice[0]!r:.60} comes more than once in an object; remove one")
    return found


def _object(value: Any, place: str) -> dict[str, Any] | RowError:
    """Return `value` unchanged; an error, which begins with `place`, if it is no JSON object."""
    if isinstance(value, dict):
        return value
    return RowError(
        f'{place}: expected an object like {{"prompt": ...}}, found {type(value).__name__}'
    )
