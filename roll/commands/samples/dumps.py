"""Samples of the files in `rollouts/`, as tables with the columns of `samples/`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from roll.output_dir.sample_files import schema

SAME = (
    "id",
    "tag",
    "prompt",
    "response",
    "ground_truth",
    "reward",
    "turn_reward",
    "failed_rewards",
    "turns",
    "logprob_mean",
    "finish_reason",
    "prompt_tokens",
    "response_tokens",
)
"""Columns that the files have as they are."""
NO_SAMPLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, pa.ArrowException)
"""Errors of Python and Arrow on a line that holds no sample."""


def read_dump(path: Path, step: int) -> tuple[Any, int]:
    """Return the samples of a file as a table with the columns of `sample_files.schema`, null where
    the file does not say; and the number of lines that hold no sample, such as one that is being
    written."""
    rows, broken = [], 0
    for line in path.read_bytes().decode(errors="replace").split("\n"):
        if line.strip():
            try:
                rows.append(pa.RecordBatch.from_pylist([_row(line, step)], schema=schema()))
            except NO_SAMPLE:
                broken += 1
    return pa.Table.from_batches(rows, schema=schema()), broken


def _row(line: str, step: int) -> dict[str, Any]:
    """Return the columns of a line; an error of Python or Arrow if it holds no sample."""
    given = json.loads(line)
    group = str(given["id"]).rpartition("/")[0]
    oldest, newest = given.get("weight_version") or (None, None)
    steps = given.get("steps")
    return {
        **{name: given.get(name) for name in SAME},
        "step": step,
        "split": "train",
        "group": group,
        "prompt_id": group.partition("/")[2].partition("+")[0],
        "rewards": list(given["rewards"].items()),
        "parts": list(given["parts"].items()),
        "step_rewards": steps and [{"end": end, "reward": value} for end, value in steps],
        "truncated": given["finish_reason"] == "length",
        "oldest_version": oldest,
        "newest_version": newest,
    }
