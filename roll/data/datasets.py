"""Datasets by source, with reports and a fingerprint; and the loading of tokenized prompts."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from roll.config.evaluation import QuestionData
from roll.config.sections.data import DataConfig, FileConfig, SourceConfig
from roll.core.errors import CheckpointError, DataError
from roll.core.types import Prompt
from roll.data.chat.prompts import UNANSWERED, MapRow, PromptMaker
from roll.data.chat.templates import PromptTokenizer
from roll.data.columns import map_row
from roll.data.pictures.picture import identities
from roll.data.pictures.placeholders import Placeholders
from roll.data.store.load import RowStore, load_rows
from roll.data.store.rows import Chained, StoredRows
from roll.data.store.tally import Tally

log = logging.getLogger(__name__)


class Item(Protocol):
    """Row of a dataset, a prompt or an example."""

    @property
    def id(self) -> str:
        """Identity of the row, `<source>:<row>`, stable across runs."""
        ...

    @property
    def source(self) -> str:
        """Name of the data source that the row is from."""
        ...

    @property
    def tag(self) -> str:
        """Tag of the row: who scores or teaches it."""
        ...


Row = TypeVar("Row", bound=Item)


@dataclass(frozen=True, slots=True)
class SourceReport:
    """Counts of the rows of one source that were kept, left out or changed.

    Example: SourceReport(name="gsm8k", kept=990, rows=1000, too_long=10, longest_tokens=1830)
    """

    name: str
    kept: int
    """Number of rows in the dataset."""
    rows: int
    """Number of rows that were read."""
    too_long: int
    """Number of rows that were left out or cut because of their length."""
    longest_tokens: int
    """Tokens of the longest row, rows that were left out included."""
    altered: int = 0
    """Number of rows with an answer of which the chat template drops a part."""
    unknown: int = 0
    """Number of rows with text that the tokenizer does not know."""
    remarks: tuple[str, ...] = ()
    """Sentences for the log: how many rows were left out or changed, and why."""
    lengths: Sequence[int] = field(default=(), repr=False)
    """Tokens of each row that was tokenized, those that are too long included."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Number of rows that are not in the dataset, by reason; with `kept` they sum up to `rows`."""
    unanswered: str = ""
    """File and line of the first row whose expected answer is empty."""


@dataclass(frozen=True)
class Source(Generic[Row]):
    """Rows of one source, in file order."""

    name: str
    """File stem or name of the hub dataset; unique within a `Dataset`."""
    weight: float
    items: Sequence[Row]
    """In memory, or on disk (`StoredRows`)."""
    digest: str | None = None
    """Hash of the content of rows on disk; None for rows in memory."""

    @cached_property
    def tags(self) -> Mapping[str, int]:
        """Number of rows with each tag."""
        if isinstance(self.items, StoredRows):
            return self.items.tags
        return Counter(item.tag for item in self.items)

    def find(self, row_id: str) -> Row | None:
        """Return the row with this id; None if there is none."""
        if isinstance(self.items, StoredRows):
            return self.items.find(row_id)
        at = self._places.get(row_id)
        return None if at is None else self.items[at]

    @cached_property
    def _places(self) -> dict[str, int]:
        """Place of each row by its id."""
        return {item.id: at for at, item in enumerate(self.items)}


@dataclass(frozen=True, slots=True)
class Dataset(Generic[Row]):
    """All rows of a run, source by source."""

    sources: tuple[Source[Row], ...]
    report: tuple[SourceReport, ...]
    fingerprint: str
    """Hash of the content of all rows."""

    def __len__(self) -> int:
        return sum(len(source.items) for source in self.sources)

    @property
    def items(self) -> Sequence[Row]:
        """All rows, source after source."""
        return Chained([source.items for source in self.sources])

    @property
    def in_memory(self) -> Iterator[Row]:
        """Rows that are not on disk: all rows with pictures are among them."""
        kept = (source for source in self.sources if not isinstance(source.items, StoredRows))
        return (item for source in kept for item in source.items)

    @property
    def tags(self) -> Mapping[str, int]:
        """Number of rows with each tag."""
        return sum((Counter(source.tags) for source in self.sources), Counter())

    def find(self, row_id: str) -> Row:
        """Return the row with this id; CheckpointError if the data has none."""
        for source in self.sources:
            found = source.find(row_id)
            if found is not None:
                return found
        raise CheckpointError(f"the checkpoint names row {row_id!r}, the data has none")


def load_prompts(
    sources: Sequence[SourceConfig] | Mapping[str, SourceConfig],
    data: DataConfig | QuestionData,
    tokenizer: PromptTokenizer,
    placeholders: Placeholders | None = None,
    map_one: MapRow = map_row,
    store: RowStore | None = None,
) -> Dataset[Prompt]:
    """Read the prompts of all sources, render them with the chat template and tokenize them.

    Args:
        sources: training sources, or validation sets by name; row ids then begin with this name.
        data: template settings and the limit of prompt tokens.
        tokenizer: tokenizer of the model that gets the prompts.
        placeholders: those of this model; None: rows with pictures are refused.
        map_one: function that converts a raw row by the columns of its source.
        store: folder in which the prompts of large sources are kept, for `map_row` only; None: all
            stay in memory.

    Raises:
        ConfigError: there are rows with pictures, but the model takes none.
        DataError: a source cannot be read, or most of its prompts are too long, or have pictures
            that cannot be read.
    """
    loaded = [
        source_prompts(name, source, data, tokenizer, placeholders, map_one, store)
        for name, source in named_sources(sources).items()
    ]
    for _, report in loaded:
        log_report(report, "prompts")
    kept = tuple(source for source, _ in loaded)
    return Dataset(kept, tuple(report for _, report in loaded), fingerprint(kept, identity))


def identity(prompt: Prompt) -> list[Any]:
    """Return what the fingerprint covers of a prompt: all but the text, which the tokens stand for.
    Rows without further columns have the fingerprint of earlier versions, whose runs resume."""
    told = [prompt.id, list(prompt.tokens), prompt.answer, prompt.tag]
    if prompt.pictures is not None:
        told.append(identities(prompt.pictures))
    return [*told, dict(prompt.extra)] if prompt.extra else told


def content_of(prompt: Prompt) -> tuple[list[Sequence[int]], list[str]]:
    """Return the tokens of a prompt, as those of one sequence, and the identities of its
    pictures."""
    return [prompt.tokens], identities(prompt.pictures) if prompt.pictures else []


def source_prompts(
    name: str,
    source: SourceConfig,
    data: DataConfig | QuestionData,
    tokenizer: PromptTokenizer,
    placeholders: Placeholders | None = None,
    map_one: MapRow = map_row,
    store: RowStore | None = None,
) -> tuple[Source[Prompt], SourceReport]:
    """Load the prompts of one source; see `load_prompts` for arguments and errors."""
    maker = PromptMaker(name, source, data, tokenizer, placeholders, map_one)
    loaded = load_rows(name, source, maker, store)
    tally = loaded.tally
    tally.broken.refuse_most(source.path, tally.read)
    if not tally.lengths:
        raise DataError(f"{source.path}: none of {tally.read} rows is left: {tally.dropped}")
    _refuse_most_lost(source.path, tally.lengths, data.max_prompt_tokens)
    report = _report(name, len(loaded.items), tally, data.max_prompt_tokens)
    return Source(name, source.weight, loaded.items, loaded.digest), report


def _report(name: str, kept: int, tally: Tally, limit: int) -> SourceReport:
    """Return the report on a source of prompts; those of more than `limit` tokens are left out."""
    remarks = []
    too_long = sum(length > limit for length in tally.lengths)
    if tally.broken:
        remarks.append(tally.broken.told(tally.read))
    if tally.dropped.counts:
        remarks.append(str(tally.dropped))
    if too_long:
        remarks.append(
            f"{too_long} left out because they are longer than max_prompt_tokens = {limit} (the "
            f"longest has {tally.longest} tokens)"
        )
    if tally.unknown.rows:
        remarks.append(tally.unknown.told(tally.read))
    return SourceReport(
        name,
        kept,
        tally.read,
        too_long,
        tally.longest,
        unknown=tally.unknown.rows,
        remarks=tuple(remarks),
        lengths=tally.lengths,
        left_out=tally.left_out | ({f"more than {limit} tokens": too_long} if too_long else {}),
        unanswered=tally.dropped.first.get(UNANSWERED, ""),
    )


def log_report(report: SourceReport, what: str) -> None:
    """Log how many rows of a source were kept; as a warning if the report has remarks. `what` is
    the plural noun for its rows, such as `prompts`."""
    if report.remarks:
        told = "; ".join(report.remarks)
        log.warning("source %s: %d of %d %s; %s", report.name, report.kept, report.rows, what, told)
    else:
        log.info("source %s: %d %s", report.name, report.kept, what)


def _refuse_most_lost(path: str, lengths: Sequence[int], limit: int) -> None:
    """Raise DataError if more than half of the prompts of a source are longer than `limit`
    tokens."""
    lost = sum(length > limit for length in lengths)
    if 2 * lost <= len(lengths):
        return
    share = "all" if lost == len(lengths) else f"{lost} of"
    ordered = sorted(lengths)
    raise DataError(
        f"{path}: {share} {len(lengths)} prompts are longer than max_prompt_tokens = {limit} (half "
        f"have at most {ordered[len(ordered) // 2]} tokens, the longest has {ordered[-1]}); raise "
        "`data.max_prompt_tokens`, or take the long ones out of the file"
    )


S = TypeVar("S", bound=FileConfig)


def named_sources(sources: Sequence[S] | Mapping[str, S]) -> dict[str, S]:
    """Return sources by name: the file stem, or the last part of a hub name.

    If several sources have the same stem, the second is named `<stem>-2`, and so on. A mapping is
    returned as a dict with the same names.
    """
    if isinstance(sources, Mapping):
        return dict(sources)
    named: dict[str, S] = {}
    for source in sources:
        path = Path(source.path)
        stem = path.stem or "source"
        name, number = stem, 2
        while name in named:
            name, number = f"{stem}-{number}", number + 1
        named[name] = source
    return named


def fingerprint(sources: Sequence[Source[Row]], identity: Callable[[Row], list[Any]]) -> str:
    """Return a hash of the content of all rows, 32 hexadecimal digits.

    Args:
        identity: function that returns everything a run depends on in a row, as plain JSON; not
            called for rows on disk, which have their hash.
    """
    digest = hashlib.sha256()
    for source in sources:
        digest.update(json.dumps([source.name, len(source.items)]).encode())
        if source.digest is not None:
            digest.update(source.digest.encode())
            continue
        for item in source.items:
            # Further columns may hold what JSON has not, such as dates in a Parquet file.
            digest.update(json.dumps(identity(item), default=str).encode())
    return digest.hexdigest()[:32]
