"""Loading of the rows of a source: small ones into memory, large ones into files that are kept."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from roll.config.sections.data import FileConfig
from roll.core.errors import DataError
from roll.data.chat.unknown_text import UnknownText
from roll.data.preparation.parts import no_rows
from roll.data.sources import raw_rows
from roll.data.store.chunks import chunks_of
from roll.data.store.folder import made_in_full, sole_maker
from roll.data.store.key import files_of, key_of, states_of
from roll.data.store.making import Maker, Tagged, UnstorableError
from roll.data.store.rows import HASHES, LENGTHS, NUMBERS, REPORT, ROWS, StoredRows
from roll.data.store.tally import Tally
from roll.data.store.workers import parts, schema
from roll.platform.machine import cores

log = logging.getLogger(__name__)

Row = TypeVar("Row", bound=Tagged)

LARGE_BYTES = 1 << 25
"""Bytes of the files of a source from which on its rows are kept on disk; fewer are tokenized in
less time than processes take to start."""
TOLD_EVERY_S = 30.0
"""Time between two lines of the log while rows are tokenized."""


@dataclass(frozen=True)
class RowStore:
    """Place of the tokenized rows of large sources."""

    folder: Path | None
    """Folder in which they are kept. None: they are made at each start, in the folder for temporary
    files, and are gone when the process ends."""
    large_bytes: int = LARGE_BYTES
    """Bytes of a source from which on it is large."""
    processes: int = field(default_factory=lambda: len(cores()))
    """Number of processes that tokenize."""

    @classmethod
    def at(cls, path: str | None) -> RowStore:
        """Return the store in the folder of `data.cache`."""
        return cls(None if path is None else Path(path).expanduser().absolute())


@dataclass(frozen=True)
class Loaded(Generic[Row]):
    """Rows of a source, in memory or on disk."""

    items: Sequence[Row]
    tally: Tally
    digest: str | None
    """Hash of the content of rows on disk; None for rows in memory."""


def load_rows(
    name: str, source: FileConfig, maker: Maker[Row], store: RowStore | None
) -> Loaded[Row]:
    """Return all rows of a source, tokenized.

    Args:
        name: name of the source, with which the ids of its rows begin.
        store: place of large sources; None: all rows stay in memory.

    Raises:
        DataError: the source cannot be read, has no rows or a wrong one, changes meanwhile, or
            there is no room for its tokenized rows.
        WorkerError, WaitTimeoutError: see `parts` and `sole_maker`.
    """
    if store is not None:
        files = files_of(source)
        if sum(size for size, _ in states_of(files)) >= store.large_bytes:
            try:
                found = _kept(name, source, maker, store, files)
                return Loaded(found, found.tally, found.digest)
            except UnstorableError as reason:
                log.info("source %s stays in memory: it has %s", name, reason)
    made = maker.make(raw_rows(source))
    made.tally.refuse_mistakes(source)
    if not made.tally.read:
        raise no_rows(source.path, source.part, made.tally.rows + made.tally.skipped)
    return Loaded(tuple(made.rows), made.tally, None)


def _kept(
    name: str, source: FileConfig, maker: Maker[Row], store: RowStore, files: Sequence[Path]
) -> StoredRows[Row]:
    """Return the rows of a large source, which are made if the store does not have them; see
    `load_rows`."""
    if store.folder is None:
        folder = Path(tempfile.mkdtemp(prefix="roll_rows_")) / "rows"
        try:
            rows = StoredRows(folder, name, maker)
            _make(name, source, maker, store, files, folder)
            rows.open()
        finally:  # what is open can be read on
            shutil.rmtree(folder.parent)
        return rows
    folder = store.folder / key_of(name, source, maker, files)
    rows = StoredRows(folder, name, maker)
    if not folder.exists():
        with sole_maker(folder):
            if not folder.exists():
                _make(name, source, maker, store, files, folder)
    rows.open()
    log.info("source %s: its tokenized rows are in %s", name, folder)
    return rows


def _make(
    name: str,
    source: FileConfig,
    maker: Maker[Any],
    store: RowStore,
    files: Sequence[Path],
    folder: Path,
) -> None:
    """Tokenize the rows of a source into `folder`; see `load_rows`."""
    before = states_of(files)
    log.info("source %s: tokenizing with %d processes", name, store.processes)
    with made_in_full(folder) as part:
        _write(name, source, maker, store.processes, part)
        if states_of(files) != before:
            raise DataError(f"{source.path}: was changed while it was read; start again")


def _write(name: str, source: FileConfig, maker: Maker[Any], processes: int, folder: Path) -> None:
    """Write all files of the rows of a source.

    Raises:
        OSError: the disk is full.
        DataError, WorkerError, WaitTimeoutError: see `load_rows`.
    """
    import numpy as np
    import pyarrow as pa

    tally = Tally(UnknownText(getattr(maker.tokenizer, "unk_token", None)))
    numbers, hashes, digest = array("q"), bytearray(), hashlib.sha256()
    tags: Counter[str] = Counter()
    batches: list[int] = []
    told = time.monotonic()
    with (
        pa.OSFile(str(folder / ROWS), "wb") as file,
        pa.ipc.new_file(file, schema()) as writer,
    ):
        for part in parts(chunks_of(source), maker, processes):
            writer.write_batch(pa.ipc.read_record_batch(pa.py_buffer(part.batch), schema()))
            own = array("q", part.numbers)
            batches.append(len(own))
            numbers.extend(number + tally.rows for number in own)
            hashes += part.hashes
            digest.update(part.digests)
            tags += part.tags
            tally.add(part.tally)
            if time.monotonic() > told + TOLD_EVERY_S:
                told = time.monotonic()
                log.info("source %s: %d rows tokenized", name, tally.rows)
    tally.refuse_mistakes(source)
    if not tally.read:
        raise no_rows(source.path, source.part, tally.rows + tally.skipped)
    digest.update(numbers.tobytes())
    np.save(folder / NUMBERS, np.frombuffer(numbers, np.int64))
    np.save(folder / LENGTHS, np.frombuffer(tally.lengths, np.uint32))
    np.save(folder / HASHES, np.frombuffer(bytes(hashes), np.uint8).reshape(-1, 16))
    report = {
        "digest": digest.hexdigest(),
        "batches": batches,
        "tags": tags,
        "tally": tally.to_json(),
    }
    (folder / REPORT).write_text(json.dumps(report))
