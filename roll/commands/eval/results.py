"""Results of an evaluation: a JSON file for each model, and one table for all.

The JSON has the fields of lm-evaluation-harness, as far as they fit: `results` (`"metric,filter"`
-> value, `"metric_stderr,filter"` -> standard error), `configs`, `versions`, `n-shot`,
`higher_is_better`, `n-samples`. `intervals` is ours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from roll.commands.eval.cells import Cell
from roll.commands.eval.scores import Score, Scores
from roll.output_dir.whole_file import replace_file

FILTER = "none"
"""Name of the filter in the keys: responses are scored as they are."""
VERSION = 1
"""Version of how sets are scored; a change that changes scores raises it."""
LOW_IS_BETTER = ("tokens", "truncated", "left_out")


@dataclass(frozen=True, slots=True)
class Line:
    """Scores of one model in one cell."""

    model: str
    cell: Cell
    task: str
    """Name of the set; with the temperature if there are several."""
    rows: int
    """Number of rows of the set's data, those included that are too long."""
    whole: Scores
    by_tag: dict[str, Scores]
    """Scores of the questions with each tag, if there are several."""
    run: str | None = None
    """Name of the run of which the model is a checkpoint; None if it is of none."""
    step: int | None = None
    """Number of steps that the run had done."""


def write_results(folder: Path, lines: Sequence[Line], model: dict[str, Any]) -> None:
    """Write `results.json` of one model.

    Args:
        folder: folder of the model's results.
        lines: scores of the model.
        model: settings of the model and its engine, for the file.
    """
    results: dict[str, Any] = {}
    intervals: dict[str, Any] = {}
    for line in lines:
        for name, scores in _with_tags(line).items():
            results[name] = {"alias": name} | _keyed(scores)
            intervals[name] = {key: one.interval for key, one in scores.by_name.items()}
    tasks = {name: line for line in lines for name in _with_tags(line)}
    told = {
        "results": results,
        "group_subtasks": {name: [] for name in tasks},
        "configs": {name: _config(name, line) for name, line in tasks.items()},
        "versions": dict.fromkeys(tasks, VERSION),
        "n-shot": dict.fromkeys(tasks, 0),
        "higher_is_better": {
            name: {key: key not in LOW_IS_BETTER for key in scores.by_name}
            for line in lines
            for name, scores in _with_tags(line).items()
        },
        "n-samples": {
            name: {"original": line.rows if name == line.task else own.questions}
            | {"effective": own.questions}
            for line in lines
            for name, own in _with_tags(line).items()
        },
        "intervals": {"level": 0.95, "unit": "question", "values": intervals},
        "config": model,
        "model_name": model["model"]["path"],
        "model_source": model["engine"]["kind"],
    }
    replace_file(folder / "results.json", json.dumps(told, indent=2, ensure_ascii=False) + "\n")


def _with_tags(line: Line) -> dict[str, Scores]:
    """Return name -> scores of a line: those of all questions, then of each tag."""
    return {line.task: line.whole} | {f"{line.task}/{tag}": s for tag, s in line.by_tag.items()}


def _keyed(scores: Scores) -> dict[str, float | str]:
    """Return scores under the keys of lm-evaluation-harness; a standard error that is not known is
    `N/A` there."""
    found: dict[str, float | str] = {}
    for name, score in scores.by_name.items():
        found[f"{name},{FILTER}"] = score.value
        found[f"{name}_stderr,{FILTER}"] = "N/A" if score.stderr is None else score.stderr
    return found


def _config(name: str, line: Line) -> dict[str, Any]:
    """Return what a task is, for the field `configs`."""
    questions = line.cell.questions
    sampling = questions.sampling.model_dump(mode="json")
    return {
        "task": name,
        "dataset_path": questions.data.sources[0].path,
        "dataset_name": questions.data.sources[0].subset,
        "test_split": questions.data.sources[0].split,
        "output_type": "generate_until",
        "doc_to_text": questions.data.template or questions.data.sources[0].columns.prompt,
        "repeats": questions.samples_per_prompt,
        "generation_kwargs": sampling,
        "metadata": {"version": VERSION, "file": str(line.cell.file)},
        "roll": questions.model_dump(mode="json"),
    }


COLUMNS = ("model", "set", "T", "n", "questions", "mean", "pass@n", "maj@n", "tokens", "cut off")


def row_of(line: Line) -> list[str]:
    """Return the cells of a line in the table, by `COLUMNS`."""
    scores, n = line.whole, line.whole.samples
    by_name, sampling = scores.by_name, line.cell.questions.sampling
    return [
        line.model,
        line.cell.set_name,
        f"{sampling.temperature:g}",
        str(n),
        str(scores.questions),
        _with_margin(by_name.get(f"mean@{n}")),
        _shown(by_name.get(f"pass@{n}")),
        _shown(by_name.get(f"maj@{n}")),
        f"{by_name['tokens'].value:.1f}",
        f"{100 * by_name['truncated'].value:.1f} %",
    ]


def _shown(score: Score | None) -> str:
    """Return a score with four digits; a dash for none."""
    return "-" if score is None else f"{score.value:.4f}"


def _with_margin(score: Score | None) -> str:
    """Return a score with half the width of its interval."""
    if score is None or score.interval is None:
        return _shown(score)
    return f"{score.value:.4f} +- {score.interval[1] - score.value:.4f}"


def table_of(lines: Sequence[Line]) -> Table:
    """Return the table of all lines, for the terminal."""
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, no_wrap=True)
    for line in lines:
        table.add_row(*map(Text, row_of(line)))
    return table


def markdown_of(lines: Sequence[Line]) -> str:
    """Return the table of all lines as Markdown."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *map(row_of, lines)]
    text = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"{text}\nmean +- half of its 95 % interval, by question.\n"
