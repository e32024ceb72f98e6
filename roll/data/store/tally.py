"""Counts of what became of the rows of a source, which can be added part by part."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from roll.data.chat.unknown_text import SHOWN, UnknownText
from roll.data.pictures.broken import BrokenPictures


@dataclass
class DroppedRows:
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


@dataclass
class Tally:
    """Counts of what became of the rows of a source, or of a part of it."""

    unknown: UnknownText
    rows: int = 0
    """Number of rows that the function of the source returned; that were read, if it has none."""
    skipped: int = 0
    """Number of rows of which this function returned none."""
    elsewhere: int = 0
    """Number of rows that are not in the part of the source that is asked for."""
    lengths: array[int] = field(default_factory=lambda: array("I"))
    """Tokens of each row that was tokenized, those that are too long included; of a pair, those of
    its longer sequence."""
    dropped: DroppedRows = field(default_factory=DroppedRows)
    broken: BrokenPictures = field(default_factory=BrokenPictures)

    @property
    def longest(self) -> int:
        """Tokens of the longest row; 0 without any."""
        return max(self.lengths, default=0)

    @property
    def read(self) -> int:
        """Number of rows of the part that were read, and more if the function made several of
        one."""
        return self.rows + self.skipped - self.elsewhere

    def note_skipped(self, reason: str, place: str) -> None:
        """Count a row that the function of the source has left out."""
        self.skipped += 1
        self.dropped.note(reason, place)

    def add(self, later: Tally) -> None:
        """Add the counts of the part that follows; it has no broken pictures."""
        assert not later.broken, "rows with pictures are not kept in parts"
        self.rows += later.rows
        self.skipped += later.skipped
        self.elsewhere += later.elsewhere
        self.lengths.extend(later.lengths)
        for reason, count in later.dropped.counts.items():
            self.dropped.counts[reason] = self.dropped.counts.get(reason, 0) + count
            self.dropped.first.setdefault(reason, later.dropped.first[reason])
        self.unknown.rows += later.unknown.rows
        self.unknown.first = self.unknown.first or later.unknown.first
        for example in later.unknown.examples:
            if len(self.unknown.examples) < SHOWN and example not in self.unknown.examples:
                self.unknown.examples.append(example)

    def to_json(self) -> dict[str, Any]:
        """Return all but the lengths as plain JSON."""
        return {
            "rows": self.rows,
            "skipped": self.skipped,
            "elsewhere": self.elsewhere,
            "dropped": self.dropped.counts,
            "first": self.dropped.first,
            "unknown": vars(self.unknown),
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any], lengths: array[int]) -> Self:
        """Return the tally of which `to_json` told, with these lengths."""
        dropped = DroppedRows(dict(told["dropped"]), dict(told["first"]))
        unknown = UnknownText(**told["unknown"])
        counts = (told["rows"], told["skipped"], told["elsewhere"])
        return cls(unknown, *counts, lengths, dropped)
