"""Loading of texts and preferences as tokenized examples, with counts of rows left out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from roll.config.sections.data import (
    FileConfig,
    PreferenceSource,
    RowsConfig,
    TextDataConfig,
    TextSource,
)
from roll.core.errors import DataError, RowError
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
from roll.data.chat.too_long import fitted
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
from roll.data.own.template import users_template
from roll.data.pictures.picture import identities
from roll.data.pictures.placeholders import Placeholders
from roll.data.preparation.parts import lies_in
from roll.data.store.load import RowStore, load_rows
from roll.data.store.making import ROWS_AT_A_TIME, Encoded, Made, UnstorableError, mapped
from roll.data.store.tally import Tally


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


def load_texts(
    sources: Sequence[TextSource] | Mapping[str, TextSource],
    data: TextDataConfig,
    tokenizer: Any,
    placeholders: Placeholders | None = None,
    store: RowStore | None = None,
) -> Dataset[Example]:
    """Load texts to imitate.

    Args:
        sources: training sources, or validation sets by name.
        placeholders: those of the model; None: rows with pictures are refused.
        store: folder in which the rows of large sources are kept; None: all stay in memory.

    Raises:
        DataError: a source cannot be read, none of its rows is left, or `data.too_long` is `refuse`
            and a sequence is too long.
        ConfigError: there are rows with pictures, but the model takes none.
    """
    return _dataset(sources, texts_of(data, tokenizer, placeholders), store)


def load_preferences(
    sources: Sequence[PreferenceSource] | Mapping[str, PreferenceSource],
    data: RowsConfig,
    tokenizer: Any,
    placeholders: Placeholders | None = None,
    store: RowStore | None = None,
) -> Dataset[Example]:
    """Load pairs, or single responses with a label.

    Arguments and errors are those of `load_texts`.
    """
    return _dataset(sources, preferences_of(data, tokenizer, placeholders), store)


S = TypeVar("S", bound=FileConfig)
Prepared = tuple[int, DialogueRow, list[list[Piece]]]
"""Number of a row, the row, and the pieces of each of its conversations."""


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
    configured: Sequence[S] | Mapping[str, S],
    reading: ExampleReader[S],
    store: RowStore | None,
) -> Dataset[Example]:
    """Load the examples of all configured sources as one dataset, and log how many rows of each
    were kept."""
    sources, reports = [], []
    for name, source in named_sources(configured).items():
        made, report = reading.source(name, source, store)
        log_report(report, "rows")
        sources.append(made)
        reports.append(report)
    return Dataset(tuple(sources), tuple(reports), fingerprint(sources, identity))


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
        self.data = data
        self.tokenizer = tokenizer
        self._placeholders = placeholders
        self._last_turn_only = last_turn_only
        self._eos_token = check_template(tokenizer, data)
        self._mark = end_mark(tokenizer, data) if data.chat_template else None

    def source(
        self, name: str, source: S, store: RowStore | None = None
    ) -> tuple[Source[Example], SourceReport]:
        """Read the examples of one source, and report on its rows.

        Args:
            store: folder in which the rows of a large source are kept; None: all stay in memory.

        Raises:
            DataError: see `load_texts`.
        """
        loaded = load_rows(name, source, ExampleMaker(self, name, source), store)
        tally, kept = loaded.tally, len(loaded.items)
        rows, losses = tally.read, tally.dropped
        tally.broken.refuse_most(source.path, rows)
        if not kept:
            raise DataError(f"{source.path}: none of {rows} rows is left: {losses}")
        remarks = [tally.broken.told(rows)] if tally.broken else []
        remarks += [str(losses)] if losses.counts else []
        remarks += [tally.unknown.told(rows)] if tally.unknown.rows else []
        report = SourceReport(
            name,
            kept,
            rows,
            sum(n for reason, n in losses.counts.items() if reason.startswith("more than")),
            tally.longest,
            losses.counts.get(ALTERED, 0),
            tally.unknown.rows,
            tuple(remarks),
            tally.lengths,
            tally.left_out,
        )
        return Source(name, source.weight, loaded.items, loaded.digest), report

    def make(
        self, name: str, source: S, raw: Iterable[RawRow], *, tokenizes: bool = True
    ) -> Made[Example]:
        """Make examples of rows of a source, as `Maker.make` does."""
        tally = Tally(UnknownText(self.tokenizer.unk_token))
        prepared = self._with_pieces(mapped(raw, source, self._map_one, tally), source, tally)
        examples: list[Example] = []
        while some := list(itertools.islice(prepared, ROWS_AT_A_TIME)):
            if tokenizes and not tally.mistakes:
                examples += self._examples(name, some, tally)
        return Made(examples, tally)

    def _examples(self, name: str, prepared: Sequence[Prepared], tally: Tally) -> Iterator[Example]:
        """Yield those of prepared rows that fit as examples; note in `tally` what became of all."""
        texts = [conversation for _, _, made in prepared for conversation in made]
        tokens = tokenized(texts, self.tokenizer, self._eos_token)
        _note_unknown(texts, tokens, [row for _, row, _ in prepared], self.tokenizer, tally)
        sequences = iter(tokens)
        for number, row, _ in prepared:
            own = tuple(next(sequences) for _ in row.conversations)
            fitting = tally.finished(row.place, self._fitted, own, row, tally)
            if fitting is not None:
                yield Example(f"{name}:{number}", fitting, row.margin, row.label, row.tag)

    def _fitted(
        self, sequences: tuple[TokenSequence, ...], row: DialogueRow, tally: Tally
    ) -> tuple[TokenSequence, ...] | None:
        """Return the sequences of a row with their pictures, as `data.too_long` wants them; None if
        the row is left out. Errors are those of `_with_pictures` and `fitted`."""
        whole = self._with_pictures(sequences, row)
        tally.lengths.append(max(map(len, whole)))
        return fitted(whole, self.data, row.place, tally.dropped)

    @property
    def identity(self) -> list[Any]:
        """Settings on which the examples depend, as plain JSON."""
        settings = self.data.model_dump(mode="json", exclude=NOT_IN_ROWS)
        return [self._map_one.__name__, settings, self._last_turn_only]

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
                    raise RowError(f"{row.place}: has pictures, and nothing here takes any")
                sequence = sequence.with_pictures(
                    conversation.pictures, self._placeholders, row.place
                )
            made.append(sequence)
        return tuple(made)

    def _with_pieces(
        self,
        rows: Iterable[tuple[int, DialogueRow]],
        source: FileConfig,
        tally: Tally,
    ) -> Iterator[Prepared]:
        """Yield each row that can be learned. Note the others, and altered answers, in `tally`."""
        losses, broken = tally.dropped, tally.broken
        for number, row in rows:
            if source.part is not None and not lies_in(source.part, row.conversations[0].messages):
                tally.elsewhere += 1
                continue
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
                        self.tokenizer,
                        self.data,
                        system=source.system,
                        place=row.place,
                        last_turn_only=self._last_turn_only,
                        mark=self._mark,
                    )
                    for conversation in row.conversations
                ]
            except NothingToLearnError as nothing:
                losses.note(str(nothing), row.place)
                continue
            except RowError as error:
                tally.mistakes.note(row.place, error)
                continue
            if any(piece.altered for conversation in made for piece in conversation):
                losses.note(ALTERED, row.place, stays=True)
            yield number, row, made


@dataclass(frozen=True)
class ExampleMaker(Generic[S]):
    """Way from the raw rows of one source to examples."""

    reader: ExampleReader[S]
    name: str
    source: S

    @property
    def identity(self) -> list[Any]:
        return self.reader.identity

    @property
    def tokenizer(self) -> Any:
        return self.reader.tokenizer

    @property
    def template(self) -> str | None:
        return users_template(self.reader.data)

    def make(self, raw: Iterable[RawRow], *, tokenizes: bool = True) -> Made[Example]:
        return self.reader.make(self.name, self.source, raw, tokenizes=tokenizes)

    def encode(self, row: Example) -> Encoded:
        if any(sequence.pictures for sequence in row.sequences):
            raise UnstorableError("pictures")
        tokens = [sequence.tokens for sequence in row.sequences]
        trained = [[at for span in each.trained for at in span] for each in row.sequences]
        return Encoded(tokens, trained, json.dumps([row.margin, row.label, row.tag]), row.tag)

    def decode(self, row_id: str, encoded: Encoded) -> Example:
        sequences = (
            TokenSequence(tuple(tokens), tuple(zip(at[::2], at[1::2], strict=True)))
            for tokens, at in zip(encoded.tokens, encoded.trained, strict=True)
        )
        return Example(row_id, tuple(sequences), *json.loads(encoded.more))


NOT_IN_ROWS = {"sources", "rows_per_step", "shuffle", "pictures", "overlap", "cache"}
"""Settings of the data on which no tokenized row depends."""

ALTERED = "an answer of which the chat template leaves out a part"


def _note_unknown(
    conversations: Sequence[Sequence[Piece]],
    sequences: Sequence[TokenSequence],
    rows: Sequence[DialogueRow],
    tokenizer: PromptTokenizer,
    tally: Tally,
) -> None:
    """Note, row by row, the text that the tokenizer maps to its unknown token."""
    texts = ["".join(piece.text for piece in conversation) for conversation in conversations]
    each = iter(unknown_pieces(texts, [one.tokens for one in sequences], tokenizer))
    for row in rows:
        tally.unknown.note([piece for _ in row.conversations for piece in next(each)], row.place)


def content_of(example: Example) -> tuple[list[tuple[int, ...]], list[str]]:
    """Return the tokens of each sequence, and the identities of all pictures."""
    pictures = [identities(each.pictures) for each in example.sequences if each.pictures]
    return [sequence.tokens for sequence in example.sequences], list(itertools.chain(*pictures))


def identity(example: Example) -> list[Any]:
    """Return what the fingerprint covers of an example. Without tags it is the fingerprint of
    earlier versions, whose runs resume."""
    sequences = [[sequence.tokens, sequence.trained] for sequence in example.sequences]
    told: list[Any] = [example.id, sequences, example.margin, example.label]
    pictures = [identities(each.pictures) for each in example.sequences if each.pictures]
    told += [pictures] if pictures else []
    return [*told, example.tag] if example.tag != "default" else told
