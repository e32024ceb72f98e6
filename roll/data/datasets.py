"""Datasets by source, with reports and a fingerprint; and the loading of tokenized prompts."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from roll.config.evaluation import QuestionData
from roll.config.sections.data import DataConfig, FileConfig, SourceConfig
from roll.core.errors import DataError, PictureError
from roll.core.types import Prompt
from roll.data.chat.templates import PromptTokenizer, render_prompts, tokenize_prompts
from roll.data.chat.unknown_text import UnknownText, unknown_pieces
from roll.data.columns import PromptRow, RawRow, map_row
from roll.data.pictures.broken import BrokenPictures
from roll.data.pictures.picture import identities
from roll.data.pictures.placeholders import Placeholders, expanded
from roll.data.sources import read_source

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


Row = TypeVar("Row", bound=Item)
MapRow = Callable[[RawRow, SourceConfig], PromptRow]
"""Function that converts a raw row by the columns of its source."""


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


@dataclass(frozen=True, slots=True)
class Source(Generic[Row]):
    """Rows of one source, in file order."""

    name: str
    """File stem or name of the hub dataset; unique within a `Dataset`."""
    weight: float
    items: tuple[Row, ...]


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
    def items(self) -> list[Row]:
        """All rows, source after source."""
        return [item for source in self.sources for item in source.items]


def load_prompts(
    sources: Sequence[SourceConfig] | Mapping[str, SourceConfig],
    data: DataConfig | QuestionData,
    tokenizer: PromptTokenizer,
    placeholders: Placeholders | None = None,
    map_one: MapRow = map_row,
) -> Dataset[Prompt]:
    """Read the prompts of all sources, render them with the chat template and tokenize them.

    Args:
        sources: training sources, or validation sets by name; row ids then begin with this name.
        data: template settings and the limit of prompt tokens.
        tokenizer: tokenizer of the model that gets the prompts.
        placeholders: those of this model; None: rows with pictures are refused.
        map_one: function that converts a raw row by the columns of its source.

    Raises:
        ConfigError: there are rows with pictures, but the model takes none.
        DataError: a source cannot be read, or most of its prompts are too long, or have pictures
            that cannot be read.
    """
    loaded = [
        source_prompts(name, source, data, tokenizer, placeholders, map_one)
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


def source_prompts(
    name: str,
    source: SourceConfig,
    data: DataConfig | QuestionData,
    tokenizer: PromptTokenizer,
    placeholders: Placeholders | None = None,
    map_one: MapRow = map_row,
) -> tuple[Source[Prompt], SourceReport]:
    """Load the prompts of one source; see `load_prompts` for arguments and errors."""
    rows = read_source(source, map_one)
    broken = BrokenPictures()
    kept = [(number, row) for number, row in enumerate(rows) if broken.is_sound(row.pictures)]
    texts = render_prompts([row for _, row in kept], tokenizer, data, source.system)
    found: list[Sequence[int]] = []
    prompts: list[Prompt] = []
    unknown = UnknownText(tokenizer.unk_token)
    tokens = tokenize_prompts(texts, tokenizer, data)
    pieces = unknown_pieces(texts, tokens, tokenizer)
    for (number, row), text, ids, lost in zip(kept, texts, tokens, pieces, strict=True):
        unknown.note(lost, row.place)
        try:
            whole, pictures = expanded(ids, row.pictures, placeholders, row.place)
        except PictureError as error:
            broken.note(str(error))
            continue
        found.append(whole)
        if len(whole) <= data.max_prompt_tokens:
            prompts.append(
                Prompt(f"{name}:{number}", whole, text, row.answer, row.tag, row.extra, pictures)
            )
    broken.refuse_most(source.path, len(rows))
    lengths = [len(ids) for ids in found]
    _refuse_most_lost(source.path, lengths, data.max_prompt_tokens)
    empty = next((prompt.id for prompt in prompts if not prompt.tokens), None)
    if empty is not None:
        raise DataError(f"{source.path}: prompt {empty} has no tokens; give it a text")
    report = _report(name, lengths, data.max_prompt_tokens, unknown, broken)
    return Source(name, source.weight, tuple(prompts)), report


def _report(
    name: str, lengths: Sequence[int], limit: int, unknown: UnknownText, broken: BrokenPictures
) -> SourceReport:
    """Return the report on a source whose prompts with sound pictures have these numbers of tokens;
    those of more than `limit` tokens are left out."""
    rows, longest, remarks = len(lengths) + len(broken), max(lengths), []
    too_long = sum(length > limit for length in lengths)
    if broken:
        remarks.append(broken.told(rows))
    if too_long:
        remarks.append(
            f"{too_long} left out because they are longer than max_prompt_tokens = {limit} (the "
            f"longest has {longest} tokens)"
        )
    if unknown.rows:
        remarks.append(unknown.told(rows))
    return SourceReport(
        name,
        len(lengths) - too_long,
        rows,
        too_long,
        longest,
        unknown=unknown.rows,
        remarks=tuple(remarks),
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
        identity: function that returns everything a run depends on in a row, as plain JSON.
    """
    digest = hashlib.sha256()
    for source in sources:
        digest.update(json.dumps([source.name, len(source.items)]).encode())
        for item in source.items:
            # Further columns may hold what JSON has not, such as dates in a Parquet file.
            digest.update(json.dumps(identity(item), default=str).encode())
    return digest.hexdigest()[:32]
