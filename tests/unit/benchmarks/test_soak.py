"""The books of the soak: slopes, and samples that are missing, doubled or too old."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import Samples, row, step_times_s
from benchmarks.soak_books import Books, Look, fitted

Row = dict[str, Any]
PROMPTS, SIBLINGS = 4, 3


def rows_of(step: int) -> list[Row]:
    return [
        {
            "id": f"{step}/train:{prompt}/{sibling}",
            "weight_version": [max(0, step - 2), step],
            "response_tokens": 6,
        }
        for prompt in range(PROMPTS)
        for sibling in range(SIBLINGS)
    ]


def taken(folder: Path, *steps: tuple[int, list[Row]]) -> Samples:
    samples = Samples(folder, PROMPTS, SIBLINGS)
    for step, rows in steps:
        text = "".join(json.dumps(one) + "\n" for one in rows)
        (folder / f"step_{step:06d}.jsonl").write_text(text)
        samples.take(step + 1)
    return samples


def test_whole_steps_are_accounted_for_and_their_dumps_deleted(tmp_path: Path) -> None:
    samples = taken(tmp_path, *((step, rows_of(step)) for step in range(5)))
    assert samples.steps == set(range(5))
    assert samples.faults == []
    assert not list(tmp_path.iterdir())


def test_a_dump_that_may_not_be_whole_yet_is_left(tmp_path: Path) -> None:
    (tmp_path / "step_000007.jsonl").write_text('{"id": ')
    samples = Samples(tmp_path, PROMPTS, SIBLINGS)
    samples.take(7)
    assert samples.steps == set()
    assert list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda rows: rows[1:], "11 samples"),
        (lambda rows: [rows[1], *rows[1:]], "12 samples, 11 ids"),
        (lambda rows: [{**rows[0], "response_tokens": 0}, *rows[1:]], "'response_tokens': 0"),
        (lambda rows: [{**rows[0], "weight_version": [1, 4]}, *rows[1:]], r"\[1, 4\]"),
    ],
)
def test_what_is_wrong_with_a_step_is_said(
    tmp_path: Path, damage: Callable[[list[Row]], list[Row]], message: str
) -> None:
    (fault,) = taken(tmp_path, (4, damage(rows_of(4)))).faults
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(fault)


def test_a_group_that_two_steps_train_on_is_found(tmp_path: Path) -> None:
    rows = [{**one, "weight_version": [3, 3]} for one in rows_of(3)]
    (fault,) = taken(tmp_path, (3, rows), (4, rows)).faults
    assert "step 4 trains again on" in fault


def test_a_slope_is_that_of_the_line_through_all_looks() -> None:
    looks = [Look(step, 100, 50 + 0.002 * step, 10 + step // 100, 4) for step in range(100, 1000)]
    growth = fitted("driver", 2, looks)
    assert growth.mb_per_1000_steps == pytest.approx(2)
    assert growth.memory_mb == pytest.approx((50.2, 51.998))
    assert growth.files[0] < growth.files[1]
    assert growth.threads == (4, 4)
    assert "| driver | 2 | 50.2 | 52.0 | +2.00 |" in row(growth)


def test_only_memory_that_grows_on_moves_a_slope() -> None:
    def slope(memory_mb: Callable[[int], float]) -> float:
        looks = [Look(step, 100, memory_mb(step), 4, 4) for step in range(300, 3000, 3)]
        return fitted("driver", 1, looks).mb_per_1000_steps

    assert slope(lambda step: 5.0 * (step > 900)) == pytest.approx(0)
    assert slope(lambda step: (step % 500) / 50) == pytest.approx(0, abs=0.6)
    assert slope(lambda step: step // 500 * 2.0) == pytest.approx(4, rel=0.15)


def test_several_looks_in_one_step_are_no_slope() -> None:
    looks = [Look(step // 4, 100, 50 + 0.1 * (step % 4), 4, 4) for step in range(400)]
    assert fitted("driver", 1, looks).mb_per_1000_steps == pytest.approx(0, abs=0.5)
    assert fitted("driver", 1, looks[:3]).mb_per_1000_steps == 0


def test_of_processes_that_replace_each_other_the_one_with_most_steps_counts() -> None:
    books = Books()
    lives = ((100, 200, 9.0), (300, 600, 3.0), (900, 100, 7.0))
    for pid, (begin, steps, slope) in enumerate(lives):
        for step in range(begin, begin + steps):
            look = Look(step, 1000, pid + slope / 1000 * step, 4, 4)
            books.take(pid, "engine", look)
            books.take(pid + 10, "young", replace(look, age_s=200))
    (growth,) = books.growths(1000)
    assert (growth.name, growth.lives) == ("engine", 3)
    assert growth.mb_per_1000_steps == pytest.approx(3)


def test_living_processes_are_looked_at() -> None:
    pid = os.fork()
    if not pid:
        os.read(os.pipe()[0], 1)  # until it is killed
    try:
        books = Books()
        for step in range(5):
            books.look(step)
        looks = books.looks(pid)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert [look.step for look in looks] == list(range(5))
    assert all(look.memory_mb > 0.1 and look.files > 2 and look.threads >= 1 for look in looks)
    assert books.shared(5).memory_mb[0] >= 0


def test_step_times_are_medians_of_the_first_and_the_last_tenth(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    times = [9.0] * 10 + [1.0] * 10 + [5.0] * 160 + [2.0] * 20
    path.write_text(
        "".join(json.dumps({"step": i, "time/step_s": t}) + "\n" for i, t in enumerate(times))
    )
    assert step_times_s(path, 200) == (1.0, 2.0)
