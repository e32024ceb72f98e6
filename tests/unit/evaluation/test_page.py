"""The page of an evaluation: curves over checkpoints, and names that stay texts."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from roll.commands.eval.answers import Answered
from roll.commands.eval.cells import Cell
from roll.commands.eval.page import results_page
from roll.commands.eval.results import Line, table_of
from roll.commands.eval.scores import Z95, scores_of
from roll.config.loading.question_sets import load_set, set_file

ATTACK = "</script><script>alert(1)</script>"


def a_line(run: str | None, step: int | None, rewards: list[float]) -> Line:
    """Scores of a checkpoint whose response to each question has such a reward."""
    file = set_file("gsm8k")
    cell = Cell("gsm8k", load_set(file), Path(file))
    answers = [
        Answered(f"s:{i}", "a", [reward], {}, [4], [False], None)
        for i, reward in enumerate(rewards)
    ]
    name = f"{run}-step{step}" if run else "base"
    scores = scores_of(answers, 1, 1.0)
    return Line(name, cell, "gsm8k", len(rewards), scores, {}, run, step)


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found is not None
    return json.loads(found[1])


def test_a_run_with_several_checkpoints_has_curves_with_their_intervals() -> None:
    rewards = {10: [0, 0, 1, 0], 20: [1, 0, 1, 0], 40: [1, 1, 1, 0]}
    lines = [a_line("sorting", step, rewards[step]) for step in (40, 10, 20)]  # type: ignore[arg-type]
    data = data_of(results_page([a_line(None, None, [1, 0]), *lines, a_line("other", 5, [1, 0])]))
    assert [group["label"] for group in data["groups"]] == ["sorting"], "others have one point"
    [series] = data["series"]["gsm8k/mean@1"]
    assert data["steps"][series["steps"]] == [10, 20, 40]
    values, low, high = series["values"]
    assert values == [0.25, 0.5, 0.75]
    half = Z95 * (0.25 * 0.75 / 3) ** 0.5  # N - 1 in the variance, then the root of N
    assert (low[0], high[0]) == pytest.approx((0.25 - half, 0.25 + half), rel=1e-5)
    assert "gsm8k/mean@1" in [name for panel in data["panels"] for name in panel["names"]]


def test_without_several_checkpoints_there_is_the_table_alone() -> None:
    page = results_page([a_line(None, None, [1, 0]), a_line("run", 5, [1, 1])])
    assert data_of(page)["panels"] == []
    assert "<td>run-step5</td>" in page
    assert "Over checkpoints" not in page


def test_a_name_stays_a_text_and_no_other_script_may_run() -> None:
    page = results_page([a_line(ATTACK, step, [1, 0]) for step in (1, 2)])
    assert ATTACK not in page
    assert "default-src &#x27;none&#x27;" in page
    assert page.count("<script") == 2, "the data, and the script of the page"
    assert data_of(page)["groups"][0]["label"] == ATTACK


def test_a_name_stays_a_text_in_the_terminal() -> None:
    shown = io.StringIO()
    Console(file=shown, width=200).print(table_of([a_line("[red]a[/x]", 1, [1, 0])]))
    assert "[red]a[/x]-step1" in shown.getvalue()
