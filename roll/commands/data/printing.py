"""Output of `roll data`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from roll.commands.data.duplicates import Duplicates
from roll.commands.data.look import Look, ShownRow, SourceLook
from roll.commands.samples.show import printable

BAR = 40
"""Width of the longest bar of a histogram."""
LONGEST_TEXT = 2000
"""Characters of a piece of text that are shown; the middle of longer ones is left out."""


def print_look(look: Look, out: Console, *, as_json: bool) -> None:
    """Print a look at the rows of a run.

    Args:
        as_json: print one JSON object. It has escapes for all but ASCII.
    """
    if as_json:
        out.out(json.dumps(asdict(look)), highlight=False)
        return
    for source in look.sources:
        _print_source(source, look.limit, out)
    out.out("in training and in validation:", style="bold", highlight=False)
    for line in look.overlap or ["no row"]:
        out.out(f"  {line}", style="yellow" if look.overlap else None, highlight=False)


def _print_source(source: SourceLook, limit: int, out: Console) -> None:
    """Print counts, histogram and rows of a source."""
    what = "validation set" if source.held_out else "source"
    heading = f"{what} {source.name}: {source.kept} of {source.read} rows"
    out.out(heading, style="bold", highlight=False)
    for remark in source.remarks:
        out.out(f"  {remark}", style="yellow", highlight=False)
    for line in _of_duplicates(source.duplicates):
        out.out(f"  {line}", style="yellow", highlight=False)
    out.out(
        f"  tokens of a row: half have at most {source.median}, the longest {source.longest}; the "
        f"limit is {limit}",
        highlight=False,
    )
    most = max((count for _, _, count in source.histogram), default=1)
    for first, last, count in source.histogram:
        bar = "#" * -(-BAR * count // most)
        out.out(f"  {first:>7} to {last:>7}  {count:>9}  {bar}", highlight=False)
    for row in source.rows:
        _print_row(row, out)


def _of_duplicates(found: Duplicates) -> Iterator[str]:
    """Yield sentences about rows that repeat an earlier one."""
    if found.first is not None:
        later, earlier = found.first
        yield f"{found.rows} rows repeat an earlier one (first: {later} is {earlier})"
    if found.contradicting:
        named = "; ".join(
            f"{each.id} {_answer(each.answer)}, {each.earlier_id} {_answer(each.earlier_answer)}"
            for each in found.contradictions
        )
        more = found.contradicting - len(found.contradictions)
        yield (
            f"{found.contradicting} of them expect another answer than the earlier one: {named}"
            f"{f'; and {more} more' if more else ''}. No policy can give both: correct them, or "
            "leave them out (`fn` of the source)"
        )


def _answer(text: str) -> str:
    """Return an expected answer in quotes, cut to 40 characters."""
    return printable(repr(text if len(text) <= 40 else f"{text[:37]}..."))


def _print_row(row: ShownRow, out: Console) -> None:
    """Print a row: its trained text is green in a terminal, and in [[ ]] elsewhere."""
    out.out(f"  {row.id} ({row.tokens} tokens)", style="bold", highlight=False)
    for number, pieces in enumerate(row.sequences):
        if len(row.sequences) > 1:
            out.out(f"  {('chosen', 'rejected')[number]}:", highlight=False)
        text = Text()
        for piece in pieces:
            shown = _shortened(piece.text)
            if not piece.trained:
                text.append(shown)
            elif out.is_terminal:
                text.append(shown, style="green")
            else:
                text.append(f"[[{shown}]]")
        out.print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)
    if row.answer:
        out.out(f"  answer: {_shortened(row.answer)}", highlight=False)


def _shortened(text: str) -> str:
    """Return a text without the middle, if it is long, and with escapes for what a terminal would
    obey."""
    text = printable(text)
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n... {len(text) - LONGEST_TEXT} characters ...\n{text[-half:]}"
