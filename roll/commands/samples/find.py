"""Samples of a run that fit a condition, from all files that it has kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from roll.commands.samples.dumps import read_dump
from roll.commands.samples.expressions import condition, entries, sort_key
from roll.config.errors import nearest
from roll.core.errors import DataError
from roll.output_dir.sample_files import dump_files, sample_files, schema

ROWS = 1024
"""Number of samples in memory at a time, beside those that are returned."""
HEAVY = frozenset({"prompt_ids", "response_ids", "logprobs", "versions", "branches"})
"""Columns of tokens, which nobody reads."""
_KEY = "sort key"
KEYS = 30
"""Largest number of entries that an error names."""


@dataclass(frozen=True, slots=True)
class Question:
    """Samples that somebody wants to see."""

    where: str | None = None
    """Condition; see `expressions`."""
    step: int | None = None
    """Step of training, or number of steps before a validation; None: all."""
    sort: str | None = None
    """Expression whose smallest values come first; None: in the order of training."""
    limit: int = 20
    """Largest number of samples."""
    tokens: bool = False
    """Whether token ids and log-probs are wanted, too."""


@dataclass
class Found:
    """Samples that fit a question."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """Columns of `sample_files.schema` by name."""
    files: int = 0
    """Number of files that were looked at."""
    broken: int = 0
    """Number of lines that held no sample."""


def find_samples(output_dir: Path, question: Question) -> Found:
    """Return the samples that a question asks for. Files are read until it is answered.

    Raises:
        DataError: the folder has no samples, or none of the step; a file is damaged; or the
            condition or the sort key is wrong, or names an entry that no sample has.
    """
    where = None if question.where is None else condition(question.where, schema(), "--where")
    key = None if question.sort is None else sort_key(question.sort, schema(), "--sort")
    names = [name for name in schema().names if question.tokens or name not in HEAVY]
    columns = {name: pc.field(name) for name in names} | ({} if key is None else {_KEY: key})
    found, best = Found(), None
    files = _files(output_dir, question.step)
    for option, text in (("--where", question.where), ("--sort", question.sort)):
        for column, entry in entries(text or "0"):
            _check_entry(option, column, entry, files)
    for path, step in files:
        found.files += 1
        for table in _read(path, step, columns, where, found):
            best = table if best is None else pa.concat_tables([best, table])
            if key is not None:
                best = best.take(pc.sort_indices(best, sort_keys=[(_KEY, "ascending")]))
            best = best.slice(0, question.limit)
        if key is None and best is not None and len(best) == question.limit:
            break
    if best is not None:
        found.rows = best.select(names).to_pylist()
    return found


def _files(output_dir: Path, step: int | None) -> list[tuple[Path, int]]:
    """Return the files of a run with their steps, in order; a validation comes before the step that
    follows it. Of steps without a file in `samples/`, that in `rollouts/`.

    Raises:
        DataError: there are none.
    """
    train = dump_files(output_dir) | sample_files(output_dir, "train")
    validation = sample_files(output_dir, "validation")
    named = [(one, 1, path) for one, path in train.items()]
    named += [(one, 0, path) for one, path in validation.items()]
    if not named:
        raise DataError(
            f"{output_dir} holds no samples: expected the output_dir of a run with samples/ "
            "(track.samples) or rollouts/ (track.rollouts_every)"
        )
    chosen = [(path, one) for one, _, path in sorted(named) if step is None or one == step]
    if not chosen:
        steps = sorted({one for one, _, _ in named})
        shown = ", ".join(map(str, steps if len(steps) <= 8 else [*steps[:4], "...", *steps[-4:]]))
        raise DataError(f"--step {step}: {output_dir} holds no samples of it (steps: {shown})")
    return chosen


def _check_entry(option: str, column: str, key: str, files: Sequence[tuple[Path, int]]) -> None:
    """Raise DataError if no sample has an entry. Files are read until one has it.

    Args:
        option: option of the command that names it.
        column: column with named numbers.
        files: files with their steps.
    """
    known: set[str] = set()
    for path, step in files:
        for table in _read(path, step, {column: pc.field(column)}, None, Found()):
            for chunk in table[column].chunks:
                known.update(pc.unique(chunk.keys).to_pylist())
        if key in known:
            return
    listed = sorted(known)
    shown = ", ".join(listed if len(listed) <= KEYS else [*listed[:KEYS], "..."])
    raise DataError(
        f"{option}: no sample has {column}[{key!r}]{nearest(key, listed)} (known: "
        f"{shown or 'none'})"
    )


def _read(
    path: Path, step: int, columns: dict[str, Any], where: Any, found: Found
) -> Iterator[Any]:
    """Return an iterator over tables of the samples of a file that fit; DataError if it is
    damaged."""
    try:
        if path.suffix == ".jsonl":
            table, broken = read_dump(path, step)
            found.broken += broken
            data = ds.dataset(table)
        else:
            data = ds.dataset(path, schema=schema(), format="parquet")
        for batch in data.to_batches(columns=columns, filter=where, batch_size=ROWS):
            yield pa.Table.from_batches([batch])
    except (OSError, pa.ArrowException) as error:
        told = " ".join(str(error).split())[:300]
        raise DataError(f"{path} cannot be read: {told}") from error
