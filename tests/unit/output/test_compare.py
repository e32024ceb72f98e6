"""`roll compare`: settings, curves and scores of runs side by side, through the command line."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from roll.cli import app
from tests.unit.output.scripted_runs import SICK, Curve, jump, run_records
from tests.unit.output.test_report_page import a_run

Records = list[dict[str, Any]]


def compare(*arguments: object) -> tuple[int, str]:
    """Exit code and output of the command."""
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two seeds of one run, and another one, that is sick and ends earlier."""
    seeds = [a_run(tmp_path / f"fast-{s}", run_records(seed=s), seed=s) for s in (1, 2)]
    return [*seeds, a_run(tmp_path / "sick", SICK["reward_hacked"][:90], lr=0.1)]


def values(folder: Path, name: str) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record[name] for record in map(json.loads, lines) if name in record]


def test_numbers_are_means_over_the_seeds_of_what_the_runs_wrote(runs: list[Path]) -> None:
    code, output = compare(*runs, "--json")
    assert code == 0, output
    told = json.loads(output)
    assert {run["name"]: run["group"] for run in told["runs"]} == {
        "fast-1": "fast (2 seeds)",
        "fast-2": "fast (2 seeds)",
        "sick": "sick",
    }
    assert [run["steps"] for run in told["runs"]] == [120, 120, 90]
    for name, best in (("val/test/mean@1", max), ("reward/mean", max), ("entropy", None)):
        series = [values(run, name) for run in runs]
        fast, sick = (told["metrics"][name][group] for group in ("fast (2 seeds)", "sick"))
        for place, key in ((0, "first"), (-1, "last")):
            assert fast[key] == pytest.approx(fmean(s[place] for s in series[:2]), rel=1e-5)
            assert sick[key] == pytest.approx(series[2][place], rel=1e-5)
        assert fast["last_by_run"]["fast-2"] == pytest.approx(series[1][-1], rel=1e-5)
        expected = [None if best is None else pytest.approx(best(s), rel=1e-5) for s in series]
        assert sick["best"] == expected[2]
        if best is not None:
            assert fast["best"] == pytest.approx(fmean(best(s) for s in series[:2]), rel=1e-5)
        assert len(sick["curve"]) == len(series[2])


def test_settings_that_differ_are_told_without_folders_and_seeds_are_one(runs: list[Path]) -> None:
    told = json.loads(compare(*runs, "--json")[1])
    assert told["settings"] == {
        "lr": {"fast (2 seeds)": "0.001", "sick": "0.1"},
        "seed": {"fast (2 seeds)": "1, 2", "sick": "0"},
    }


def test_settings_without_a_value_are_told_in_words(tmp_path: Path) -> None:
    odd: list[dict[str, Any]] = [
        {"tags": [], "words": "", "limit": None},
        {"tags": ["a"], "words": "some", "limit": "none"},
    ]
    folders = [a_run(tmp_path / f"r{i}", run_records(), **one) for i, one in enumerate(odd)]
    told = json.loads(compare(*folders, "--json")[1])["settings"]
    assert "tags" not in told, "an empty list is told by the entries that others have"
    assert told["tags.0"] == {"r0": "not set", "r1": "a"}
    assert told["words"] == {"r0": "empty", "r1": "some"}
    assert told["limit"] == {"r0": "none", "r1": "none"}, "null is another value than a text"


def test_the_terminal_shows_alarms_settings_and_curves(runs: list[Path]) -> None:
    code, output = compare(*runs)
    assert code == 0, output
    assert "fast-1 · of fast (2 seeds) · " in output
    assert "! the reward rises, but val/test/mean@1 fell" in output
    (lr,) = [line for line in output.splitlines() if "lr" in line]
    assert "0.001" in lr
    assert "0.1" in lr
    lines = output.splitlines()
    place = next(i for i, line in enumerate(lines) if "Held-out score (test)" in line)
    assert lines[place + 1].split()[0] == "fast"
    assert "█" in lines[place + 1]
    last, other = (values(run, "val/test/mean@1")[-1] for run in runs[:2])
    assert f"{abs(last - other):.3g}" in lines[place + 1].split()
    assert lines[place + 2].split()[0] == "sick"


def test_values_that_are_not_finite_are_told_as_they_are(tmp_path: Path) -> None:
    ill: dict[str, Curve | None] = {
        "loss/total": jump(0.01, math.nan),
        "reward/mean": jump(0.4, math.nan),
    }
    folders = [a_run(tmp_path / "a", run_records(ill)), a_run(tmp_path / "b", run_records(), lr=1)]
    told = json.loads(compare(*folders, "--json")[1])
    assert told["metrics"]["reward/mean"]["a"]["last"] == "NaN"
    assert told["metrics"]["reward/mean"]["a"]["best"] == pytest.approx(0.4, abs=0.1)
    assert "nan" in compare(*folders)[1]


def test_infinities_of_both_signs_have_no_mean(tmp_path: Path) -> None:
    folders = []
    for seed, end in ((1, math.inf), (2, -math.inf)):
        ill: dict[str, Curve | None] = {"reward/mean": jump(0.4, end)}
        folders.append(a_run(tmp_path / str(seed), run_records(ill, seed=seed), seed=seed))
    other = a_run(tmp_path / "other", run_records(), lr=1)
    told = json.loads(compare(*folders, other, "--json")[1])
    assert next(iter(told["metrics"]["reward/mean"].values()))["last"] == "NaN"
    assert compare(*folders, other)[0] == 0


def test_code_beside_the_runs_is_not_run(tmp_path: Path) -> None:
    """A folder may be somebody else's."""
    part = {"kind": "theirs_to_run:Mine"}
    runs = [
        a_run(tmp_path / name, SICK["reward_hacked"][:90], algorithm={"advantage": part}, lr=lr)
        for name, lr in (("one", 0.1), ("two", 0.2))
    ]
    for run in runs:
        (run / "theirs_to_run.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    code, output = compare(*runs)
    assert code == 0, output
    assert not (tmp_path / "ran").exists()


def test_names_of_runs_are_not_read_as_markup(tmp_path: Path) -> None:
    folders = [a_run(tmp_path / name, run_records(), lr=i) for i, name in enumerate(("[red]", "b"))]
    assert "[red]" in compare(*folders)[1]


def test_a_pipe_gets_whole_lines_and_a_given_width_holds(tmp_path: Path) -> None:
    long = "x" * 150
    folders = [a_run(tmp_path / "a", run_records()), a_run(tmp_path / "b", run_records(), who=long)]
    command = [sys.executable, "-m", "roll.cli", "compare", *map(str, folders)]
    environ = {key: value for key, value in os.environ.items() if key != "COLUMNS"}

    def printed(environ: dict[str, str]) -> str:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert long in printed(environ)
    narrow = printed(environ | {"COLUMNS": "60"})
    assert max(map(len, narrow.splitlines())) <= 60


def test_one_run_or_the_same_twice_cannot_be_compared(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(runs[0])
    for wrong, says in (
        ([runs[0]], "two runs or more"),
        ([runs[0], tmp_path / "link"], "named twice"),
        ([runs[0], runs[0]], "named twice"),
        ([runs[0], tmp_path / "none"], "none is no folder"),
    ):
        code, output = compare(*wrong)
        assert code == 2, output
        assert says in " ".join(output.split())
