"""Tasks of agentic runs: seeds, and rows of files with or without a column `seed`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from roll.config.sections.environment import MAX_SEED, TaskSource
from roll.core.errors import DataError
from roll.data.sources import check_source
from roll.data.tasks import load_tasks, options_of, seed_of


def rows_of(folder: Path, *seeds: Any) -> TaskSource:
    path = folder / "tasks.jsonl"
    rows = [{"prompt": "p", "answer": "1", "seed": seed} for seed in seeds]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TaskSource(path=str(path), tag="lake")


def test_a_column_seed_is_the_seed_of_the_task_and_no_option(tmp_path: Path) -> None:
    tasks = load_tasks([rows_of(tmp_path, 0, 7, "12", 3.0, MAX_SEED)]).sources[0].items
    assert [seed_of(task, run_seed=1) for task in tasks] == [0, 7, 12, 3, MAX_SEED]
    assert options_of(tasks[1]) == {"prompt": "p", "answer": "1"}


@pytest.mark.parametrize(
    "seed",
    [
        *(None, "", "one", "\u00b2", "1.5", "9" * 40, 1.5, -1, True, [1], {}),
        *(MAX_SEED + 1, 10**400, float("nan"), float("inf")),
    ],
)
def test_a_column_seed_that_is_no_seed_is_told_with_its_row(seed: Any, tmp_path: Path) -> None:
    expected = (
        r"tasks.jsonl:2: column 'seed', .* must be a whole number from 0 to 2147483647, found .*; "
        "correct it, or give the column another name"
    )
    with pytest.raises(DataError, match=expected):
        load_tasks([rows_of(tmp_path, 1, seed)])
    with pytest.raises(DataError, match=expected.replace(":2:", ":1:")):
        check_source(rows_of(tmp_path, seed))


def test_a_part_in_which_no_task_lies_is_named(tmp_path: Path) -> None:
    source = rows_of(tmp_path, 1, 2).model_copy(update={"part": (0.0, 1e-9)})
    with pytest.raises(DataError, match=r"tasks\.jsonl: none of 2 rows lies in part .*; widen it"):
        load_tasks([source])


def test_a_column_that_is_mapped_is_no_seed(tmp_path: Path) -> None:
    path = rows_of(tmp_path, "text").path
    source = TaskSource.model_validate({"path": path, "columns": {"answer": "seed"}})
    (task,) = load_tasks([source]).sources[0].items
    assert (task.answer, seed_of(task, run_seed=1) >> 31) == ("text", 0)


def test_seeds_end_at_31_bits() -> None:
    assert TaskSource(seeds=2, first_seed=MAX_SEED - 1).seeds == 2
    with pytest.raises(ValidationError, match="the last seed would be 2147483648, and seeds end"):
        TaskSource(seeds=2, first_seed=MAX_SEED)
