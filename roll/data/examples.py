"""Sources of texts and preferences -> tokenized examples, with a count of what was left out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from roll.config.data import FileConfig, PreferenceSource, RowsConfig, TextDataConfig, TextSource
from roll.core.errors import DataError
from roll.data.columns import RawRow
from roll.data.datasets import Dataset, Source, SourceReport, fingerprint, named_sources
from roll.data.dialogues import DialogueRow, map_preference, map_text
from roll.data.end_mark import end_mark
from roll.data.sources import read_source
from roll.data.spans import (
    NothingToLearnError,
    Piece,
    TokenSequence,
    check_template,
    pieces,
    tokenized,
)
from roll.data.templates import PromptTokenizer
from roll.data.unknown import UnknownText, unknown_pieces

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Example:
    """A row that is ready to be trained on."""

    id: str
    """`<source>:<row>`, stable across runs."""
    sequences: tuple[TokenSequence, ...]
    """One; of a pair the chosen one, then the rejected one."""
    margin: float | None = None
    label: bool | None = None
    tag: str = "default"
    """Routes it to its teacher."""

    @property
    def source(self) -> str:
        """Name of the data source it is from."""
        return self.id.rpartition(":")[0]


def mismatched(examples: Sequence[Example], max_tokens: int) -> list[Example]:
    """Each prompt with the response to the one before it, cut to `max_tokens`."""
    made: list[Example] = []
    for example, before in zip(examples, [examples[-1], *examples[:-1]], strict=True):
        for j, own in enumerate(example.sequences):
            other = before.sequences[j % len(before.sequences)]
            moved = own.num_before - other.num_before
            sequence = TokenSequence(
                (*own.tokens[: own.num_before], *other.tokens[other.num_before :]),
                tuple((start + moved, stop + moved) for start, stop in other.trained),
            )
            cut = sequence.without_end(max_tokens)
            made.append(Example(f"mismatched:{len(made)}", (cut,), label=True))
    return made


@dataclass
class _Losses:
    """Rows that were left out or cut, by reason."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def note(self, reason: str, place: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, place)

    def __str__(self) -> str:
        told = [f"{n} with {why} (first: {self.first[why]})" for why, n in self.counts.items()]
        return ", ".join(told)


def load_texts(
    sources: Sequence[TextSource] | Mapping[str, TextSource],
    data: TextDataConfig,
    tokenizer: Any,
    *,
    base_dir: Path | None = None,
) -> Dataset[Example]:
    """Texts to imitate.

    Args:
        sources: training sources, or validation sets by name.
        base_dir: where relative paths begin; the working directory when left out.

    Raises:
        DataError: a source cannot be read, nothing of it is left, or `data.too_long` is `refuse`
            and a sequence is.
    """
    return _dataset(
        sources,
        map_text,
        data,
        tokenizer,
        base_dir,
        last_turn_only=data.train_on == "last_assistant",
    )


def load_preferences(
    sources: Sequence[PreferenceSource] | Mapping[str, PreferenceSource],
    data: RowsConfig,
    tokenizer: Any,
    *,
    base_dir: Path | None = None,
) -> Dataset[Example]:
    """Pairs, or single responses with a label; arguments and errors as of `load_texts`."""
    return _dataset(sources, map_preference, data, tokenizer, base_dir, last_turn_only=False)


S = TypeVar("S", bound=FileConfig)


def _dataset(
    configured: Sequence[S] | Mapping[str, S],
    map_one: Callable[[RawRow, S], DialogueRow],
    data: RowsConfig,
    tokenizer: Any,
    base_dir: Path | None,
    *,
    last_turn_only: bool,
) -> Dataset[Example]:
    eos_token = check_template(tokenizer, data)
    mark = end_mark(tokenizer, data) if data.chat_template else None
    sources, reports = [], []
    for name, source in named_sources(configured).items():
        found = read_source(source, map_one, base_dir)
        losses = _Losses()
        texts: list[list[Piece]] = []
        kept: list[tuple[int, DialogueRow]] = []
        for number, row in enumerate(found):
            if _all_equal(row):
                losses.note("equal answers", row.place)
                continue
            try:
                made = [
                    pieces(
                        dialogue,
                        tokenizer,
                        data,
                        system=source.system,
                        place=row.place,
                        last_turn_only=last_turn_only,
                        mark=mark,
                    )
                    for dialogue in row.dialogues
                ]
            except NothingToLearnError as nothing:
                losses.note(str(nothing), row.place)
                continue
            if any(piece.altered for dialogue in made for piece in dialogue):
                losses.note(ALTERED, row.place)
            texts += made
            kept.append((number, row))
        made_of = tokenized(texts, tokenizer, eos_token)
        unknown = _unknown(texts, made_of, [row for _, row in kept], tokenizer)
        sequences = iter(made_of)
        examples, longest = [], 0
        for number, row in kept:
            own = tuple(next(sequences) for _ in row.dialogues)
            longest = max(longest, *map(len, own))
            fitted = _fitted(own, data, row.place, losses)
            if fitted is not None:
                examples.append(Example(f"{name}:{number}", fitted, row.margin, row.label, row.tag))
        sources.append(Source(name, source.weight, tuple(examples)))
        report = _report(name, source.path, len(examples), len(found), longest, losses)
        reports.append(replace(report, unknown=unknown.rows))
        if unknown.rows:
            logger.warning("source %s: %s", name, unknown.told(len(found)))
    return Dataset(tuple(sources), tuple(reports), fingerprint(sources, _identity))


def _unknown(
    dialogues: Sequence[Sequence[Piece]],
    sequences: Sequence[TokenSequence],
    rows: Sequence[DialogueRow],
    tokenizer: PromptTokenizer,
) -> UnknownText:
    texts = ["".join(piece.text for piece in dialogue) for dialogue in dialogues]
    each = iter(unknown_pieces(texts, [one.tokens for one in sequences], tokenizer))
    unknown = UnknownText(tokenizer.unk_token)
    for row in rows:
        unknown.note([piece for _ in row.dialogues for piece in next(each)], row.place)
    return unknown


def _all_equal(row: DialogueRow) -> bool:
    return len(row.dialogues) == 2 and row.dialogues[0].after == row.dialogues[1].after


def _fitted(
    sequences: tuple[TokenSequence, ...], data: RowsConfig, place: str, losses: _Losses
) -> tuple[TokenSequence, ...] | None:
    """The sequences, cut where the config says so; None where the row is left out."""
    limit, longest = data.max_tokens, max(map(len, sequences))
    if longest <= limit:
        return sequences
    what = f"more than {limit} tokens"
    if data.too_long == "refuse":
        raise DataError(
            f"{place}: {longest} tokens are more than data.max_tokens = {limit}; raise it, or let "
            "data.too_long say what becomes of such rows: drop, cut_start or cut_end"
        )
    cut: list[TokenSequence] = []
    if data.too_long == "cut_start":
        surplus = longest - limit
        if all(surplus < sequence.num_before for sequence in sequences):
            # As much of each: what a pair has in common stays in common.
            cut = [sequence.without_start(surplus) for sequence in sequences]
    elif data.too_long == "cut_end":
        cut = [sequence.without_end(limit) for sequence in sequences]
    if not cut or not all(sequence.trained for sequence in cut):
        losses.note(what, place)
        return None
    if len(cut) == 2 and cut[0].tokens == cut[1].tokens:
        losses.note("equal answers after the cut", place)
        return None
    losses.note(f"{what}, which were cut,", place)
    return tuple(cut)


ALTERED = "an answer of which the chat template leaves out a part"


def _report(
    name: str, path: str, kept: int, rows: int, longest: int, losses: _Losses
) -> SourceReport:
    if not kept:
        raise DataError(f"{path}: none of {rows} rows is left: {losses}")
    if losses.counts:
        logger.warning("source %s: %d of %d rows; %s", name, kept, rows, losses)
    else:
        logger.info("source %s: %d rows", name, kept)
    long = sum(count for reason, count in losses.counts.items() if reason.startswith("more than"))
    return SourceReport(name, kept, long, longest, losses.counts.get(ALTERED, 0))


def _identity(example: Example) -> list[Any]:
    told = [[sequence.tokens, sequence.trained] for sequence in example.sequences]
    return [example.id, told, example.margin, example.label]
