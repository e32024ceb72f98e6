"""Interface of what turns raw rows into tokenized ones, here or in another process."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeVar

from roll.config.sections.data import FileConfig
from roll.core.errors import RowError
from roll.data.columns import RawRow
from roll.data.preparation.parts import counts_in
from roll.data.preparation.processors import processed
from roll.data.store.tally import Tally


class Tagged(Protocol):
    """Row with an id and a tag."""

    @property
    def id(self) -> str:
        """Identity of the row, `<source>:<row>`."""
        ...

    @property
    def tag(self) -> str:
        """Tag of the row."""
        ...


ROWS_AT_A_TIME = 256
"""Number of rows that are tokenized at a time: tokenizers tell much more of each token than its id,
and all of it is in memory at once."""

Row = TypeVar("Row", bound=Tagged)
Row_co = TypeVar("Row_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Made(Generic[Row_co]):
    """Tokenized rows of a part of a source, and what became of the others."""

    rows: Sequence[Row_co]
    """Their ids are `<source>:<number>`, counted from the first row of the part on."""
    tally: Tally


class Maker(Protocol[Row]):
    """Way from the raw rows of one source to tokenized rows."""

    @property
    def identity(self) -> list[Any]:
        """Return what the tokenized rows depend on beside rows, source and tokenizer, as plain
        JSON."""
        ...

    @property
    def tokenizer(self) -> Any:
        """Tokenizer, which `save_pretrained` writes."""
        ...

    @property
    def template(self) -> str | None:
        """Import path of the chat template that the user brings; None for the tokenizer's."""
        ...

    def make(self, raw: Iterable[RawRow], *, tokenizes: bool = True) -> Made[Row]:
        """Tokenize rows, and note rows with mistakes in the tally.

        Args:
            tokenizes: False if only mistakes are wanted, because a row has one already.

        Raises:
            DataError: something is wrong that does not concern one row.
        """
        ...

    def encode(self, row: Row) -> Encoded:
        """Return a row in the form of the file; UnstorableError if it cannot be kept there."""
        ...

    def decode(self, row_id: str, encoded: Encoded) -> Row:
        """Return the row that `encode` was given, with this id."""
        ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """A row in the form of the file."""

    tokens: Sequence[Sequence[int]]
    """Tokens of each sequence."""
    trained: Sequence[Sequence[int]]
    """Starts and stops of the trained ranges of each sequence, in turns."""
    more: str
    """Everything else but the id, as JSON."""
    tag: str


Source = TypeVar("Source", bound=FileConfig)
Mapped = TypeVar("Mapped")


def mapped(
    raw: Iterable[RawRow],
    source: Source,
    map_one: Callable[[RawRow, Source], Mapped],
    tally: Tally,
) -> Iterator[tuple[int, Mapped]]:
    """Yield the rows of a source with their numbers, after its function, with their columns mapped;
    count them in `tally`, and note there those with mistakes and those that the function leaves
    out. ConfigError if there is no such function."""

    def note(reason: str, place: str) -> None:
        elsewhere = source.part is not None and not counts_in(source.part, place)
        tally.note_skipped(reason, place, elsewhere=elsewhere)

    for number, row in enumerate(processed(raw, source, note)):
        tally.rows += 1
        try:
            found = map_one(row, source)
        except RowError as error:
            tally.mistakes.note(row.place, error)
            continue
        yield number, found


class UnstorableError(Exception):
    """Error for a row that stays in memory: it has pictures, or columns that JSON does not hold."""


def is_json(value: Any) -> bool:
    """Return whether a value comes back from JSON as it is, with its types."""
    if value is None or type(value) in (bool, int, float, str):
        return True
    if type(value) is list:
        return all(map(is_json, value))
    if isinstance(value, Mapping):
        return type(value) is dict and all(
            type(key) is str and is_json(each) for key, each in value.items()
        )
    return False


def content_hash(sequences: Sequence[Sequence[int]], pictures: Sequence[str] = ()) -> bytes:
    """Return a hash of the tokens of all sequences of a row, 16 bytes.

    Args:
        pictures: identities of the row's pictures, for which its tokens only hold the room.
    """
    content = tokens_bytes(sequences) + "".join(pictures).encode()
    return blake2b(content, digest_size=16).digest()


def tokens_bytes(sequences: Sequence[Sequence[int]]) -> bytes:
    """Return the tokens of all sequences of a row, each after its length, as bytes."""
    parts = (array("i", [len(each), *each]).tobytes() for each in sequences)
    return b"".join(parts)
