"""Record of the rows of a source that have mistakes, so that all are told at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll.core.errors import RowError

SHOWN = 10
"""Largest number of mistakes that an error describes, and of rows that it names for one of them."""


@dataclass
class Mistakes:
    """Rows with mistakes, by what is wrong with them. Its length is their number."""

    rows: int = 0
    alike: dict[str, Alike] = field(default_factory=dict)
    """Rows with the same mistake, by its text without the place of a row; of the first ones."""

    def __len__(self) -> int:
        return self.rows

    def note(self, place: str, error: RowError) -> None:
        """Note a row by its place and by what is wrong with it."""
        text = str(error).removeprefix(place)
        self._add(text, Alike(1, [place]))
        self.rows += 1

    def add(self, later: Mistakes) -> None:
        """Add the mistakes of the rows that follow."""
        for text, alike in later.alike.items():
            self._add(text, alike)
        self.rows += later.rows

    def _add(self, text: str, more: Alike) -> None:
        """Add rows with the same mistake, if it is one of the first ones."""
        if text not in self.alike and len(self.alike) == SHOWN:
            return
        known = self.alike.setdefault(text, Alike())
        known.rows += more.rows
        known.places += more.places[: SHOWN - len(known.places)]

    def refuse(self, path: str, of: str) -> None:
        """Raise an error that tells all mistakes, if there are any.

        Args:
            path: file of the source.
            of: number of rows that were read, those with mistakes included, in words.

        Raises:
            RowError: there are mistakes. One alone is told as it was noted.
        """
        if not self.rows:
            return
        told = [alike.told(text, path) for text, alike in self.alike.items()]
        if self.rows == 1:
            raise RowError(told[0])
        others = self.rows - sum(alike.rows for alike in self.alike.values())
        told += [f"and {others} rows with other mistakes"] if others else []
        lines = "\n  ".join(told)
        raise RowError(f"{path}: {self.rows} of {of} rows have mistakes:\n  {lines}")


@dataclass
class Alike:
    """Rows with the same mistake."""

    rows: int = 0
    places: list[str] = field(default_factory=list)
    """Places of the first ones."""

    def told(self, text: str, path: str) -> str:
        """Return the mistake of the first row, and which others have it."""
        first, *others = self.places
        if not others:
            return f"{first}{text}"
        named = ", ".join(_within(place, path) for place in others)
        more = self.rows - len(self.places)
        rest = f" and {more} more" if more else ""
        return f"{first}{text} (the same in {named}{rest})"


def _within(place: str, path: str) -> str:
    """Return the place of a row in its file, such as `line 17`."""
    number = place.removeprefix(path).removeprefix(":").strip()
    return f"line {number}" if number.isdecimal() else number
