"""Look at the rows of a run: lengths, rows left out, duplicates, overlap, and some rows whole."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from roll.commands.data.duplicates import Duplicates, duplicates_of
from roll.config.agentic_base import AgenticBase
from roll.config.errors import ConfigError
from roll.config.offline_base import OfflineConfig
from roll.config.rlvr_base import RlvrBase
from roll.config.run import RunConfig
from roll.core.errors import DataError
from roll.core.types import Prompt
from roll.data import datasets, examples
from roll.data.datasets import Dataset, Source, SourceReport
from roll.data.examples import Example
from roll.data.preparation.overlap import ContentOf, Overlap, Rule, overlaps, without
from roll.pipeline.offline import load_offline
from roll.runtime.run_data import RunData, load_data

BINS = 10
"""Largest number of bars of a histogram of lengths."""
USUAL = 95
"""Percentage of the rows that share all bars but the last, if the others are far longer."""


@dataclass(frozen=True)
class Piece:
    """Part of the text of a row; the parts together are the text."""

    text: str
    trained: bool


@dataclass(frozen=True)
class ShownRow:
    """A row as the model reads it."""

    id: str
    tokens: int
    """Number of tokens, of all sequences."""
    sequences: list[list[Piece]]
    """Text of the prompt, or of each sequence."""
    answer: str | None
    """Reference answer of a prompt; None for texts and pairs."""


@dataclass(frozen=True)
class SourceLook:
    """Rows of one source or validation set."""

    name: str
    held_out: bool
    """Whether it is a validation set."""
    kept: int
    read: int
    remarks: list[str]
    """Sentences about rows that were left out, cut or changed, and why."""
    median: int
    """Tokens of the middle one of the rows by length, those that are too long included."""
    longest: int
    """Tokens of the longest row."""
    histogram: list[tuple[int, int, int]]
    """First and last number of tokens of each bar, and its rows."""
    duplicates: Duplicates
    rows: list[ShownRow]


@dataclass(frozen=True)
class Look:
    """All that is to be seen."""

    sources: list[SourceLook]
    overlap: list[str]
    """Sentences about training rows that are in validation sets, too, and what the run does."""
    limit: int
    """Largest number of tokens of a row, or of a prompt."""


def look_at(config: RunConfig, rows: int) -> Look:
    """Read and tokenize all rows of a run, as the run does.

    Args:
        rows: number of rows of each source to show, spread over it.

    Raises:
        ConfigError: it is a run of agents, or its tokenizer cannot be loaded.
        DataError: a source cannot be read, or none of its rows is left.
    """
    if isinstance(config, AgenticBase):
        raise ConfigError(
            "tasks of agents have no tokens before their episodes; `roll env try` shows those"
        )
    assert isinstance(config, RlvrBase | OfflineConfig)
    # Rows that are held out, too, are what this command tells.
    data = config.data.model_copy(update={"overlap": "warn"})
    whole = config.model_copy(update={"data": data})
    rule = config.data.overlap
    if isinstance(whole, RlvrBase):
        limit = whole.data.max_prompt_tokens
        return _looked(load_data(whole), datasets.content_of, _prompt, limit, rows, rule)
    assert isinstance(whole, OfflineConfig)
    limit = whole.data.max_tokens
    return _looked(load_offline(whole), examples.content_of, _example, limit, rows, rule)


Show = Callable[[Any, Any], ShownRow]
"""Function that returns a row as it is shown; its second argument is the tokenizer."""


def _looked(
    data: RunData[Any], content: ContentOf, show: Show, limit: int, rows: int, rule: Rule
) -> Look:
    """Return the look at loaded rows; see `look_at`."""
    parts: list[tuple[Dataset[Any], bool]] = [(data.train, False), (data.held_out, True)]
    sources = [
        _source(source, report, held, content, lambda row: show(row, data.tokenizer), rows)
        for dataset, held in parts
        for source, report in zip(dataset.sources, dataset.report, strict=True)
    ]
    found = overlaps(data.train, data.held_out, content)
    told = [str(each) for each in found]
    if found:
        told.append(_consequence(data, found, rule))
    return Look(sources, told, limit)


def _consequence(data: RunData[Any], found: Sequence[Overlap], rule: Rule) -> str:
    """Return what the run does about its overlap."""
    if rule == "refuse":
        return "the run would not start (data.overlap: refuse)"
    if rule == "warn":
        return "the run would train on these rows (data.overlap: warn)"
    try:
        left = sum(len(source.items) for source in without(data.train, found))
    except DataError as error:
        return f"the run would not start: {error}"
    return f"{len(data.train) - left} training rows would be left out (data.overlap: drop)"


def _source(
    source: Source[Any],
    report: SourceReport,
    held_out: bool,
    content: ContentOf,
    show: Callable[[Any], ShownRow],
    rows: int,
) -> SourceLook:
    """Return the look at a source."""
    lengths = sorted(report.lengths)
    count = min(rows, len(source.items))
    return SourceLook(
        name=source.name,
        held_out=held_out,
        kept=report.kept,
        read=report.rows,
        remarks=list(report.remarks),
        median=lengths[len(lengths) // 2],
        longest=report.longest_tokens,
        histogram=histogram(lengths),
        duplicates=duplicates_of(source, content),
        rows=[show(source.items[i * len(source.items) // count]) for i in range(count)],
    )


def histogram(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return at most `BINS` bars from the smallest length to the largest: first and last length of
    each, and how many there are. All have the same width, but for the last one if few rows are far
    longer than the others: it has these."""
    if not lengths:
        return []
    ordered = sorted(lengths)
    low, usual, most = ordered[0], ordered[len(ordered) * USUAL // 100], ordered[-1]
    bars = BINS - 1
    if most - low <= 2 * (usual - low):
        usual, bars = most, BINS
    width = (usual - low) // bars + 1
    starts = list(range(low, usual + 1, width))
    lasts = [start + width - 1 for start in starts]
    if most > lasts[-1]:
        starts.append(lasts[-1] + 1)
        lasts.append(most)
    return [
        (start, last, bisect_right(ordered, last) - bisect_left(ordered, start))
        for start, last in zip(starts, lasts, strict=True)
    ]


def _prompt(prompt: Prompt, tokenizer: Any) -> ShownRow:
    """Return a prompt as it is shown: nothing of it is trained."""
    pieces = [[Piece(prompt.text, trained=False)]]
    return ShownRow(prompt.id, len(prompt.tokens), pieces, prompt.answer)


def _example(example: Example, tokenizer: Any) -> ShownRow:
    """Return a text or a pair as it is shown, with its trained tokens apart."""
    shown = []
    for sequence in example.sequences:
        pieces, done = [], 0
        for start, stop in (*sequence.trained, (len(sequence), len(sequence))):
            for a, b, trained in ((done, start, False), (start, stop, True)):
                if a < b:
                    text = tokenizer.decode(list(sequence.tokens[a:b]), skip_special_tokens=False)
                    pieces.append(Piece(text, trained))
            done = stop
        shown.append(pieces)
    return ShownRow(example.id, sum(map(len, example.sequences)), shown, None)
