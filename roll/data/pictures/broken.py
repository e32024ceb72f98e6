"""Record of the rows of a source that are left out because of their pictures."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from roll.core.errors import DataError
from roll.data.pictures.picture import Picture

log = logging.getLogger(__name__)

SHOWN = 5
"""Largest number of rows that a report names; the log names all."""


class BrokenPictures:
    """Record of the rows of a source with a picture that cannot be read. Its length is their
    number."""

    def __init__(self) -> None:
        self._told: list[str] = []

    def __len__(self) -> int:
        return len(self._told)

    def is_sound(self, pictures: Sequence[Picture]) -> bool:
        """Return whether all pictures of a row can be read; note the row if not."""
        wrong = next((f"{one.name}: {one.wrong}" for one in pictures if one.wrong), None)
        if wrong is not None:
            self.note(wrong)
        return wrong is None

    def note(self, what: str) -> None:
        """Note a row by what is wrong with it, which names it."""
        self._told.append(what)
        log.info("left out: %s", what)

    def told(self, of: int) -> str:
        """Return a sentence for the log: how many of `of` rows, and which."""
        more = len(self) - SHOWN
        rest = f"; and {more} more, which the log names" if more > 0 else ""
        return (
            f"{len(self)} of {of} rows left out because of pictures that cannot be read: "
            f"{'; '.join(self._told[:SHOWN])}{rest}"
        )

    def refuse_most(self, path: str, rows: int) -> None:
        """Raise DataError if more than half of the rows of a source are left out."""
        if 2 * len(self) > rows:
            raise DataError(f"{path}: {self.told(rows)}")
