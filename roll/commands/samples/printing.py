"""Output of `roll samples`."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from roll.commands.samples.find import Question, find_samples
from roll.commands.samples.show import lines_of


def print_samples(
    output_dir: Path,
    question: Question,
    out: Console,
    remarks: Console,
    *,
    full: bool,
    as_json: bool,
) -> None:
    """Print the samples of a run that a question asks for.

    Args:
        output_dir: folder of the run.
        question: which samples.
        out: gets the samples.
        remarks: gets what else is to say.
        full: whether long texts are shown whole.
        as_json: print JSON, one object a line. It has escapes for all but ASCII.

    Raises:
        DataError: see `find_samples`.
    """
    found = find_samples(output_dir, question)
    for row in found.rows:
        if as_json:
            named = row | {name: dict(row[name] or ()) for name in ("rewards", "parts")}
            out.out(json.dumps(named), highlight=False)
            continue
        for line, heading in lines_of(row, full=full):
            # `out`, not `print`: rich would read `[red]` and `:smile:` in a text.
            out.out(line, style="bold" if heading else None, highlight=False)
    if found.broken:
        remarks.print(f"{found.broken} lines in rollouts/ hold no sample", markup=False)
    if not found.rows:
        remarks.print(f"no sample of {found.files} files fits", markup=False)
    elif len(found.rows) == question.limit:
        remarks.print(f"the first {question.limit}; --limit shows more", markup=False)
