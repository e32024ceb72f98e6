"""Parts of a source, small enough to travel to another process, which reads the rows in them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from roll.config.sections.data import FileConfig
from roll.data.columns import RawRow
from roll.data.readers import CHUNK_BYTES, parquet_batches, parsed_lines
from roll.data.sources import local_path, raw_rows, resolve_format

CHUNK_ROWS = 512
"""Number of rows of a chunk whose format tells no sizes."""


class Chunk(Protocol):
    """Consecutive rows of a source."""

    def raw(self) -> Iterator[RawRow]:
        """Yield the rows; one that cannot be read holds the error."""
        ...


@dataclass(frozen=True, slots=True)
class LinesChunk:
    """Lines of a JSONL file, not parsed yet."""

    path: Path
    first: int
    """Number of the first line; the file begins with line 1."""
    lines: Sequence[bytes]

    def raw(self) -> Iterator[RawRow]:
        return parsed_lines(self.path, self.lines, self.first)


@dataclass(frozen=True, slots=True)
class BatchChunk:
    """Rows of a Parquet file in Arrow's form for sending."""

    path: Path
    first: int
    """Number of the first row; the file begins with row 0."""
    data: bytes

    def raw(self) -> Iterator[RawRow]:
        import pyarrow as pa

        with pa.ipc.open_stream(self.data) as stream:
            rows = (row for batch in stream for row in batch.to_pylist())
            for number, row in enumerate(rows, self.first):
                yield RawRow(f"{self.path}: row {number}", row)


@dataclass(frozen=True, slots=True)
class RowsChunk:
    """Rows that were read before."""

    rows: Sequence[RawRow]

    def raw(self) -> Iterator[RawRow]:
        return iter(self.rows)


def chunks_of(source: FileConfig) -> Iterator[Chunk]:
    """Yield all rows of a source, or the first `source.limit`, in order. The errors are those of
    `raw_rows`."""
    form, path = resolve_format(source), local_path(source)
    if form == "jsonl" and source.limit is None:
        yield from _lines(path)
    elif form == "parquet" and source.limit is None:
        yield from _batches(path)
    else:
        rows = raw_rows(source)
        while some := list(itertools.islice(rows, CHUNK_ROWS)):
            yield RowsChunk(some)


def _lines(path: Path) -> Iterator[Chunk]:
    """Yield the lines of a JSONL file."""
    first = 1
    with path.open("rb") as file:
        while lines := file.readlines(CHUNK_BYTES):
            yield LinesChunk(path, first, lines)
            first += len(lines)


def _batches(path: Path) -> Iterator[Chunk]:
    """Yield the rows of a Parquet file; DataError if it is not readable."""
    import pyarrow as pa

    first = 0
    for batch in parquet_batches(path, CHUNK_BYTES):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        yield BatchChunk(path, first, sink.getvalue().to_pybytes())
        first += batch.num_rows
