"""`samples/`: the samples of a run as Parquet, one file for each step and each validation."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from roll.output_dir.whole_file import replaced

Split = Literal["train", "validation"]
FOLDER = "samples"
"""Name of the folder in the output_dir of a run; it has a folder for each split."""
DUMPS = "rollouts"
"""Name of the folder beside it with a few samples of some steps, for people to read."""
_FILE = re.compile(r"step_(\d+)\.parquet")
_DUMP = re.compile(r"step_(\d+)\.jsonl")
_DUMPED = re.compile(r"step_(\d+)(?:\.jsonl)?")
"""Name of the file of a step in `rollouts/`, or of the folder of its pictures."""
_ORIGIN = b"roll"
"""Key of the metadata of a file that holds its `Origin`, as JSON."""


_REPEATED = ["split", "set", "group", "prompt_id", "tag", "prompt", "ground_truth"]
"""Columns whose values are in several rows. Only they are worth a dictionary, which costs time to
make; statistics are left out because rows are not sorted by anything that one would search for."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of the samples of a file: a model of the same kind can train on them."""

    tokenizer: str
    """Hash of the tokens and their ids (`roll.models.vocabulary`)."""
    model_type: str
    """Name of the model's architecture in transformers, such as `qwen3`."""
    pictures: bool
    """Whether prompts may have pictures, which the files do not hold."""


@cache
def schema() -> Any:
    """Return the columns of all files. Those that `rollouts/` has too have the same names there."""
    import pyarrow as pa

    ids, scores = pa.list_(pa.int32()), pa.map_(pa.string(), pa.float64())
    versions = pa.list_(pa.struct({"version": pa.int32(), "tokens": pa.int32()}))
    row = {
        "prompt_ids": ids,
        "response_ids": ids,
        "logprobs": pa.list_(pa.float32()),
        "versions": versions,
    }
    return pa.schema(
        {
            "step": pa.int32(),
            "split": pa.string(),
            "set": pa.string(),
            "id": pa.string(),
            "group": pa.string(),
            "prompt_id": pa.string(),
            "tag": pa.string(),
            "seat": pa.int32(),
            "prompt": pa.string(),
            "response": pa.string(),
            "ground_truth": pa.string(),
            "reward": pa.float64(),
            "turn_reward": pa.float64(),
            "baseline_reward": pa.float64(),
            "rewards": scores,
            "parts": scores,
            "failed_rewards": pa.list_(pa.string()),
            "step_rewards": pa.list_(pa.struct({"end": pa.int32(), "reward": pa.float32()})),
            "finish_reason": pa.string(),
            "truncated": pa.bool_(),
            "prompt_tokens": pa.int32(),
            "response_tokens": pa.int32(),
            "logprob_mean": pa.float64(),
            "oldest_version": pa.int32(),
            "newest_version": pa.int32(),
            "turns": pa.list_(
                pa.struct(
                    {
                        "by": pa.string(),
                        "text": pa.string(),
                        "reward": pa.float64(),
                        "row": pa.int32(),
                        "begin": pa.int32(),
                        "end": pa.int32(),
                        "state": pa.string(),
                    }
                )
            ),
            **row,
            "branches": pa.list_(pa.struct(row)),
        }
    )


def sample_file(output_dir: Path, split: Split, step: int) -> Path:
    """Return the file of a step, or of the validation after so many steps."""
    return output_dir / FOLDER / split / f"step_{step:06d}.parquet"


def sample_files(output_dir: Path, split: Split) -> dict[int, Path]:
    """Return step -> file, in order, of all complete files of a split."""
    return _by_step(output_dir / FOLDER / split, _FILE)


def dump_files(output_dir: Path) -> dict[int, Path]:
    """Return step -> file, in order, of all files in `rollouts/`."""
    return _by_step(output_dir / DUMPS, _DUMP)


def _by_step(folder: Path, name: re.Pattern[str]) -> dict[int, Path]:
    """Return step -> file, in order, of the files with such a name."""
    named = ((name.fullmatch(path.name), path) for path in folder.glob("step_*"))
    return dict(sorted((int(found[1]), path) for found, path in named if found))


@contextmanager
def _writer(path: Path, origin: Origin) -> Iterator[Any]:
    """Open a writer of a file, which gets its name when the block has ended without an error."""
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    columns = schema().with_metadata({_ORIGIN: json.dumps(asdict(origin))})
    with (
        replaced(path) as file,
        pq.ParquetWriter(
            file, columns, compression="zstd", use_dictionary=_REPEATED, write_statistics=False
        ) as writer,
    ):
        yield writer


def origin_of(columns: Any) -> Origin | None:
    """Return what the samples of a file were made with, by the schema of the file; None if it does
    not say so."""
    told = (columns.metadata or {}).get(_ORIGIN)
    return None if told is None else Origin(**json.loads(told))


def write_samples(path: Path, tables: Iterable[Any], origin: Origin) -> None:
    """Write tables of `schema` into a file, one row group each.

    Raises:
        OSError: the disk is full, or another error of the disk; there is no new file then.
    """
    with _writer(path, origin) as writer:
        for table in tables:
            writer.write_table(table)


def drop_samples(output_dir: Path, *, done: int) -> None:
    """Delete the files of all that a run writes again when it goes on after `done` steps, and what
    a killed session has left half written: the steps from `done` on, those in `rollouts/` with
    their pictures included, and the validations behind it; all of them if the run begins anew."""
    for path in (output_dir / FOLDER).glob("*/.*.tmp"):
        path.unlink()
    for step, path in sample_files(output_dir, "train").items():
        if step >= done:
            path.unlink()
    for step, path in sample_files(output_dir, "validation").items():
        if step > done or done == 0:
            path.unlink()
    for path in (output_dir / DUMPS).glob("step_*"):
        named = _DUMPED.fullmatch(path.name)
        if named is None or int(named[1]) < done:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
