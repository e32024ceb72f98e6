"""Loading of texts and preferences as tokenized examples, with counts of rows left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from roll.config.sections.data import (
    FileConfig,
    PreferenceSource,
    RowsConfig,
    TextDataConfig,
    TextSource,
)
from roll.core.errors import DataError, PictureError
from roll.data.chat.conversations import DialogueRow, map_preference, map_text
from roll.data.chat.end_mark import end_mark
from roll.data.chat.templates import PromptTokenizer
from roll.data.chat.tokenization import (
    NothingToLearnError,
    Piece,
    TokenSequence,
    check_template,
    pieces,
    tokenized,
)
from roll.data.chat.unknown_text import UnknownText, unknown_pieces
from roll.data.columns import RawRow
from roll.data.datasets import (
    Dataset,
    Source,
    SourceReport,
    fingerprint,
    log_report,
    named_sources,
)
from roll.data.pictures.broken import BrokenPictures
from roll.data.pictures.picture import identities
from roll.data.pictures.placeholders import Placeholders
from roll.data.sources import read_source


@dataclass(frozen=True, slots=True)
class Example:
    """Tokenized row that a model can be trained on."""

    id: str
    """Identity of the row, `<source>:<row>`, stable across runs."""
    sequences: tuple[TokenSequence, ...]
    """One sequence; or two for a pair, the chosen one and then the rejected one."""
    margin: float | None = None
    """Lead of the chosen response over the rejected one; None if the source has no margins."""
    label: bool | None = None
    """True if a single response is wanted, False if it is not; None for pairs and texts."""
    tag: str = "default"
    """Tag that selects the teacher of the example."""

    @property
    def source(self) -> str:
        """Name of the data source that the example is from."""
        return self.id.rpartition(":")[0]


def mismatched(examples: Sequence[Example], max_tokens: int) -> list[Example]:
    """Combine each prompt with the response to the previous prompt, cut to `max_tokens` tokens.

    The first prompt gets the response to the last one. Each sequence gives one example, with the
    label True. There is at least one example, and each sequence has a trained token.

    Raises:
        DataError: a picture follows a trained token.
    """
    made: list[Example] = []
    for example, before in zip(examples, [examples[-1], *examples[:-1]], strict=True):
        for j, own in enumerate(example.sequences):
            other = before.sequences[j % len(before.sequences)]
            if own.pictures is not None and own.pictures.places[-1] > own.num_before:
                raise DataError(
                    f"row {example.id}: a picture behind an answer, which kto compares with other "
                    "prompts; give such rows to another loss"
                )
            moved = own.num_before - other.num_before
            sequence = TokenSequence(
                (*own.tokens[: own.num_before], *other.tokens[other.num_before :]),
                tuple((start + moved, stop + moved) for start, stop in other.trained),
                own.pictures,
            )
            cut = sequence.without_end(max_tokens)
            made.append(Example(f"mismatched:{len(made)}", (cut,), label=True))
    return made


@dataclass
class _DroppedRows:
    """Counts of rows that were left out, cut or changed, by reason; with each first place."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def note(self, reason: str, place: str) -> None:
        """Count a row for a reason, a noun phrase; keep the place of the first row."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, place)

    def __str__(self) -> str:
        told = [f"{n} with {why} (first: {self.first[why]})" for why, n in self.counts.items()]
        return ", ".join(told)


def load_texts(
    sources: Sequence[TextSource] | Mapping[str, TextSource],
    data: TextDataConfig,
    tokenizer: Any,
    placeholders: Placeholders | None = None,
) -> Dataset[Example]:
    """Load texts to imitate.

    Args:
        sources: training sources, or validation sets by name.
        placeholders: those of the model; None: rows with pictures are refused.

    Raises:
        DataError: a source cannot be read, none of its rows is left, or `data.too_long` is `refuse`
            and a sequence is too long.
        ConfigError: there are rows with pictures, but the model takes none.
    """
    return _dataset(sources, texts_of(data, tokenizer, placeholders))


def load_preferences(
    sources: Sequence[PreferenceSource] | Mapping[str, PreferenceSource],
    data: RowsConfig,
    tokenizer: Any,
    placeholders: Placeholders | None = None,
) -> Dataset[Example]:
    """Load pairs, or single responses with a label.

    Arguments and errors are those of `load_texts`.
    """
    return _dataset(sources, preferences_of(data, tokenizer, placeholders))


S = TypeVar("S", bound=FileConfig)


def texts_of(
    data: TextDataConfig, tokenizer: Any, placeholders: Placeholders | None = None
) -> ExampleReader[TextSource]:
    """Return a reader of texts to imitate; DataError as in `ExampleReader`."""
    last = data.train_on == "last_assistant"
    return ExampleReader(map_text, data, tokenizer, placeholders, last_turn_only=last)


def preferences_of(
    data: RowsConfig, tokenizer: Any, placeholders: Placeholders | None = None
) -> ExampleReader[PreferenceSource]:
    """Return a reader of pairs, or of single responses with a label; DataError as in
    `ExampleReader`."""
    return ExampleReader(map_preference, data, tokenizer, placeholders, last_turn_only=False)


def _dataset(
    configured: Sequence[S] | Mapping[str, S], reading: ExampleReader[S]
) -> Dataset[Example]:
    """Load the examples of all configured sources as one dataset, and log how many rows of each
    were kept."""
    sources, reports = [], []
    for name, source in named_sources(configured).items():
        made, report = reading.source(name, source)
        log_report(report, "rows")
        sources.append(made)
        reports.append(report)
    return Dataset(tuple(sources), tuple(reports), fingerprint(sources, _identity))


class ExampleReader(Generic[S]):
    """Reader that turns the rows of a source into tokenized examples."""

    def __init__(
        self,
        map_one: Callable[[RawRow, S], DialogueRow],
        data: RowsConfig,
        tokenizer: Any,
        placeholders: Placeholders | None,
        *,
        last_turn_only: bool,
    ) -> None:
        """Check the chat template.

        Args:
            map_one: function that converts a row by the columns of its source.
            data: template settings, the limit of tokens, and the rule for longer rows.
            tokenizer: tokenizer of the model that is trained.
            placeholders: those of this model; None: rows with pictures are refused.
            last_turn_only: True if only the last turn of the assistant is trained.

        Raises:
            DataError: a chat template is configured, but the tokenizer has none or it renders no
                answers.
        """
        self._map_one = map_one
        self._data = data
        self._tokenizer = tokenizer
        self._placeholders = placeholders
        self._last_turn_only = last_turn_only
        self._eos_token = check_template(tokenizer, data)
        self._mark = end_mark(tokenizer, data) if data.chat_template else None

    def source(self, name: str, source: S) -> tuple[Source[Example], SourceReport]:
        """Read the examples of one source, and report on its rows.

        Raises:
            DataError: see `load_texts`.
        """
        rows = read_source(source, self._map_one)
        losses, broken = _DroppedRows(), BrokenPictures()
        kept = list(self._with_pieces(rows, source.system, losses, broken))
        texts = [conversation for _, _, made in kept for conversation in made]
        tokens = tokenized(texts, self._tokenizer, self._eos_token)
        unknown = _unknown(texts, tokens, [row for _, row, _ in kept], self._tokenizer)
        sequences = iter(tokens)
        examples, longest = [], 0
        for number, row, _ in kept:
            own = tuple(next(sequences) for _ in row.conversations)
            try:
                own = self._with_pictures(own, row)
            except PictureError as error:
                broken.note(str(error))
                continue
            longest = max(longest, *map(len, own))
            fitted = _fitted(own, self._data, row.place, losses)
            if fitted is not None:
                examples.append(Example(f"{name}:{number}", fitted, row.margin, row.label, row.tag))
        broken.refuse_most(source.path, len(rows))
        if not examples:
            raise DataError(f"{source.path}: none of {len(rows)} rows is left: {losses}")
        remarks = [broken.told(len(rows))] if broken else []
        remarks += [str(losses)] if losses.counts else []
        remarks += [unknown.told(len(rows))] if unknown.rows else []
        report = SourceReport(
            name,
            len(examples),
            len(rows),
            sum(n for reason, n in losses.counts.items() if reason.startswith("more than")),
            longest,
            losses.counts.get(ALTERED, 0),
            unknown.rows,
            tuple(remarks),
        )
        return Source(name, source.weight, tuple(examples)), report

    def _with_pictures(
        self, sequences: tuple[TokenSequence, ...], row: DialogueRow
    ) -> tuple[TokenSequence, ...]:
        """Return the sequences of a row with all placeholders of their pictures.

        Raises:
            DataError: the chat template writes others, or nothing here takes pictures.
            PictureError, ConfigError: as in `Placeholders.expanded`.
        """
        made = []
        for sequence, conversation in zip(sequences, row.conversations, strict=True):
            if conversation.pictures:
                if self._placeholders is None:
                    raise DataError(f"{row.place}: has pictures, and nothing here takes any")
                sequence = sequence.with_pictures(
                    conversation.pictures, self._placeholders, row.place
                )
            made.append(sequence)
        return tuple(made)

    def _with_pieces(
        self,
        rows: Sequence[DialogueRow],
        system: str | None,
        losses: _DroppedRows,
        broken: BrokenPictures,
    ) -> Iterator[tuple[int, DialogueRow, list[list[Piece]]]]:
        """Yield each row that can be learned: its number, itself, and the pieces of each of its
        conversations. Note the other rows, and altered answers, in `losses` and `broken`."""
        for number, row in enumerate(rows):
            if not all(broken.is_sound(each.pictures) for each in row.conversations):
                continue
            answers = [conversation.after for conversation in row.conversations]
            if len(answers) == 2 and answers[0] == answers[1]:
                losses.note("equal answers", row.place)
                continue
            try:
                made = [
                    pieces(
                        conversation,
                        self._tokenizer,
                        self._data,
                        system=system,
                        place=row.place,
                        last_turn_only=self._last_turn_only,
                        mark=self._mark,
                    )
                    for conversation in row.conversations
                ]
            except NothingToLearnError as nothing:
                losses.note(str(nothing), row.place)
                continue
            if any(piece.altered for conversation in made for piece in conversation):
                losses.note(ALTERED, row.place)
            yield number, row, made


ALTERED = "an answer of which the chat template leaves out a part"


def _unknown(
    conversations: Sequence[Sequence[Piece]],
    sequences: Sequence[TokenSequence],
    rows: Sequence[DialogueRow],
    tokenizer: PromptTokenizer,
) -> UnknownText:
    """Collect, row by row, the text that the tokenizer maps to its unknown token."""
    texts = ["".join(piece.text for piece in conversation) for conversation in conversations]
    each = iter(unknown_pieces(texts, [one.tokens for one in sequences], tokenizer))
    unknown = UnknownText(tokenizer.unk_token)
    for row in rows:
        unknown.note([piece for _ in row.conversations for piece in next(each)], row.place)
    return unknown


def _fitted(
    sequences: tuple[TokenSequence, ...], data: RowsConfig, place: str, losses: _DroppedRows
) -> tuple[TokenSequence, ...] | None:
    """Cut the sequences of a row to `data.max_tokens` as configured, and note it in `losses`; None
    if the row is left out.

    Raises:
        DataError: a sequence is too long and `data.too_long` is `refuse`.
    """
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
    if any(sequence.pictures for sequence in sequences):
        losses.note(f"{what} and pictures, which are never cut", place)
        return None
    if data.too_long == "cut_start":
        surplus = longest - limit
        if all(surplus < sequence.num_before for sequence in sequences):
            # Both sequences of a pair lose equally many tokens, so they still share their prompt.
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


def _identity(example: Example) -> list[Any]:
    """Return what the fingerprint covers of an example. Without tags it is the fingerprint of
    earlier versions, whose runs resume."""
    sequences = [[sequence.tokens, sequence.trained] for sequence in example.sequences]
    told: list[Any] = [example.id, sequences, example.margin, example.label]
    pictures = [identities(each.pictures) for each in example.sequences if each.pictures]
    told += [pictures] if pictures else []
    return [*told, example.tag] if example.tag != "default" else told
