"""Counts of what became of the rows of a source, which can be added part by part."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Self, TypeVar

from roll.config.sections.data import FileConfig
from roll.core.errors import PictureError, RowError
from roll.data.chat.unknown_text import SHOWN, UnknownText
from roll.data.pictures.broken import BrokenPictures
from roll.data.preparation.mistakes import Mistakes

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class DroppedRows:
    """Counts of rows that were left out, cut or changed, by reason; with each first place."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    staying: list[str] = field(default_factory=list)
    """Reasons for which a row was cut or changed, or is only told, but not left out."""

    def note(self, reason: str, place: str, *, stays: bool = False) -> None:
        """Count a row for a reason, a noun phrase; keep the place of the first row.

        Args:
            stays: True if the row is not left out for this reason.
        """
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, place)
        if stays and reason not in self.staying:
            self.staying.append(reason)

    @property
    def left_out(self) -> dict[str, int]:
        """Counts of the rows that were left out, by reason."""
        return {why: n for why, n in self.counts.items() if why not in self.staying}

    def add(self, later: DroppedRows) -> None:
        """Add the counts of the rows that follow."""
        for reason, count in later.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + count
            self.first.setdefault(reason, later.first[reason])
        self.staying += [reason for reason in later.staying if reason not in self.staying]

    def __str__(self) -> str:
        told = [f"{n} with {why} (first: {self.first[why]})" for why, n in self.counts.items()]
        return ", ".join(told)


@dataclass
class Tally:
    """Counts of what became of the rows of a source, or of a part of it."""

    unknown: UnknownText
    rows: int = 0
    """Number of rows that the function of the source returned; that were read, if it has none.
    Those with mistakes are among them."""
    skipped: int = 0
    """Number of rows of which this function returned none."""
    elsewhere: int = 0
    """Number of rows that are not in the part of the source that is asked for."""
    lengths: array[int] = field(default_factory=lambda: array("I"))
    """Tokens of each row that was tokenized, those that are too long included; of a pair, those of
    its longer sequence."""
    dropped: DroppedRows = field(default_factory=DroppedRows)
    broken: BrokenPictures = field(default_factory=BrokenPictures)
    mistakes: Mistakes = field(default_factory=Mistakes)
    """Rows that are no rows of the source, or that the chat template refuses. Rows that are read
    after them are not tokenized."""
    refused: Mistakes = field(default_factory=Mistakes)
    """Rows with tokens that are refused, such as too many."""

    @property
    def longest(self) -> int:
        """Tokens of the longest row; 0 without any."""
        return max(self.lengths, default=0)

    @property
    def read(self) -> int:
        """Number of rows of the part that were read, and more if the function made several of
        one."""
        return self.rows + self.skipped - self.elsewhere

    @property
    def left_out(self) -> dict[str, int]:
        """Counts of the rows that were left out, by reason."""
        broken = {"pictures that cannot be read": len(self.broken)} if self.broken else {}
        return self.dropped.left_out | broken

    def note_skipped(self, reason: str, place: str, *, elsewhere: bool) -> None:
        """Count a row that the function of the source has left out; `elsewhere`: it counts in
        another part of the source."""
        self.skipped += 1
        if elsewhere:
            self.elsewhere += 1
        else:
            self.dropped.note(reason, place)

    def finished(
        self, place: str, make: Callable[P, R | None], *args: P.args, **kwargs: P.kwargs
    ) -> R | None:
        """Return what `make` makes of a tokenized row; None if the row is left out. A row with
        pictures that cannot be read, or that is refused, is noted.

        Args:
            place: place of the row.
            make: last part of the way of a row; its errors are PictureError and RowError.
        """
        try:
            return make(*args, **kwargs)
        except PictureError as error:
            self.broken.note(str(error))
        except RowError as error:
            self.refused.note(place, error)
        return None

    def refuse_mistakes(self, source: FileConfig) -> None:
        """Raise RowError, which tells all mistakes, if rows of the source have any."""
        read = self.rows + self.skipped
        of = f"the first {read}" if read == source.limit else f"{read}"
        self.mistakes.refuse(source.path, of)
        self.refused.refuse(source.path, of)

    def add(self, later: Tally) -> None:
        """Add the counts of the part that follows; it has no broken pictures."""
        assert not later.broken, "rows with pictures are not kept in parts"
        self.rows += later.rows
        self.skipped += later.skipped
        self.elsewhere += later.elsewhere
        self.lengths.extend(later.lengths)
        self.mistakes.add(later.mistakes)
        self.refused.add(later.refused)
        self.dropped.add(later.dropped)
        self.unknown.rows += later.unknown.rows
        self.unknown.first = self.unknown.first or later.unknown.first
        for example in later.unknown.examples:
            if len(self.unknown.examples) < SHOWN and example not in self.unknown.examples:
                self.unknown.examples.append(example)

    def to_json(self) -> dict[str, Any]:
        """Return all but the lengths as plain JSON; there are no mistakes."""
        return {
            "rows": self.rows,
            "skipped": self.skipped,
            "elsewhere": self.elsewhere,
            "dropped": vars(self.dropped),
            "unknown": vars(self.unknown),
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any], lengths: array[int]) -> Self:
        """Return the tally of which `to_json` told, with these lengths."""
        dropped = DroppedRows(**told["dropped"])
        unknown = UnknownText(**told["unknown"])
        counts = (told["rows"], told["skipped"], told["elsewhere"])
        return cls(unknown, *counts, lengths, dropped)
