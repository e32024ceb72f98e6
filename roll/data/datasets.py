"""Rows by source, and prompts: tokenized, with a report of what was left out and a fingerprint."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from roll.config.sections.data import DataConfig, FileConfig, SourceConfig
from roll.core.errors import DataError
from roll.core.types import Prompt
from roll.data.chat.templates import PromptTokenizer, render_prompts, tokenize_prompts
from roll.data.chat.unknown_text import UnknownText, unknown_pieces
from roll.data.columns import map_row
from roll.data.sources import read_source

log = logging.getLogger(__name__)


class Item(Protocol):
    """A row that is ready to be used."""

    @property
    def id(self) -> str:
        """`<source>:<row>`, stable across runs."""
        ...

    @property
    def source(self) -> str:
        """Name of the data source it is from."""
        ...


Row = TypeVar("Row", bound=Item)


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What became of one source's rows.

    Example: SourceReport(name="gsm8k", kept=990, rows=1000, too_long=10, longest_tokens=1830)
    """

    name: str
    kept: int
    rows: int
    """All that were read."""
    too_long: int
    """Rows left out, or cut, because of their length."""
    longest_tokens: int
    """Tokens of the longest row, also of those left out."""
    altered: int = 0
    """Rows with an answer of which the chat template leaves out a part."""
    unknown: int = 0
    """Rows with text that the tokenizer does not know."""
    remarks: tuple[str, ...] = ()
    """What somebody should know of the rows, for people: how many were left out, and why."""


@dataclass(frozen=True, slots=True)
class Source(Generic[Row]):
    """The rows of one source, in file order."""

    name: str
    """File stem or dataset name; unique in a dataset."""
    weight: float
    items: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Dataset(Generic[Row]):
    """All rows of a run, source by source."""

    sources: tuple[Source[Row], ...]
    report: tuple[SourceReport, ...]
    fingerprint: str
    """Hash of what the rows say; differs when any of them does."""

    def __len__(self) -> int:
        return sum(len(source.items) for source in self.sources)

    @property
    def items(self) -> list[Row]:
        """All rows, source after source."""
        return [item for source in self.sources for item in source.items]


def load_prompts(
    sources: Sequence[SourceConfig] | Mapping[str, SourceConfig],
    data: DataConfig,
    tokenizer: PromptTokenizer,
) -> Dataset[Prompt]:
    """Read, render and tokenize.

    Args:
        sources: training sources, or validation sets by name (the name then begins the ids).
        data: template settings and the limit of prompt tokens.
        tokenizer: of the model that will read the prompts.

    Raises:
        DataError: a source cannot be read, or most of its prompts are too long.
    """
    loaded = [
        source_prompts(name, source, data, tokenizer)
        for name, source in named_sources(sources).items()
    ]
    for _, report in loaded:
        log_report(report, "prompts")
    kept = tuple(source for source, _ in loaded)
    return Dataset(kept, tuple(report for _, report in loaded), fingerprint(kept, _identity))


def _identity(prompt: Prompt) -> list[Any]:
    return [prompt.id, prompt.tokens, prompt.answer, prompt.tag]


def source_prompts(
    name: str,
    source: SourceConfig,
    data: DataConfig,
    tokenizer: PromptTokenizer,
) -> tuple[Source[Prompt], SourceReport]:
    """Of one source; see `load_prompts`."""
    rows = read_source(source, map_row)
    texts = render_prompts(rows, tokenizer, data, source.system)
    tokens = tokenize_prompts(texts, tokenizer, data)
    unknown = UnknownText(tokenizer.unk_token)
    for row, pieces in zip(rows, unknown_pieces(texts, tokens, tokenizer), strict=True):
        unknown.note(pieces, row.place)
    prompts = tuple(
        Prompt(
            id=f"{name}:{number}",
            tokens=ids,
            text=text,
            answer=row.answer,
            tag=row.tag,
            extra=row.extra,
        )
        for number, (row, text, ids) in enumerate(zip(rows, texts, tokens, strict=True))
        if len(ids) <= data.max_prompt_tokens
    )
    _refuse_most_lost(source.path, [len(ids) for ids in tokens], data.max_prompt_tokens)
    empty = next((prompt.id for prompt in prompts if not prompt.tokens), None)
    if empty is not None:
        raise DataError(f"{source.path}: prompt {empty} has no tokens; give it a text")
    too_long, longest = len(rows) - len(prompts), max(len(ids) for ids in tokens)
    remarks = []
    if too_long:
        remarks.append(
            f"{too_long} left out because they are longer than max_prompt_tokens = "
            f"{data.max_prompt_tokens} (the longest has {longest} tokens)"
        )
    if unknown.rows:
        remarks.append(unknown.told(len(rows)))
    report = SourceReport(
        name,
        len(prompts),
        len(rows),
        too_long,
        longest,
        unknown=unknown.rows,
        remarks=tuple(remarks),
    )
    return Source(name, source.weight, prompts), report


def log_report(report: SourceReport, what: str) -> None:
    """Say what became of a source's rows, as a warning where there is something to remark."""
    if report.remarks:
        told = "; ".join(report.remarks)
        log.warning("source %s: %d of %d %s; %s", report.name, report.kept, report.rows, what, told)
    else:
        log.info("source %s: %d %s", report.name, report.kept, what)


def _refuse_most_lost(path: str, lengths: Sequence[int], limit: int) -> None:
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
    """Sources by file stem (the last part of a hub name); a second one of a stem gets a number."""
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
    """Of everything in the rows that a run depends on.

    Args:
        identity: a row as plain JSON.
    """
    digest = hashlib.sha256()
    for source in sources:
        digest.update(json.dumps([source.name, len(source.items)]).encode())
        for item in source.items:
            digest.update(json.dumps(identity(item)).encode())
    return digest.hexdigest()[:32]
