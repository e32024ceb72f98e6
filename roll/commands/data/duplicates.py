"""Rows of a source that repeat an earlier one, and those of them that contradict it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from roll.core.types import Prompt
from roll.data.datasets import Source
from roll.data.preparation.overlap import ContentOf, hashes_of

SHOWN = 3
"""Largest number of contradictions that are kept."""


@dataclass(frozen=True)
class Contradiction:
    """A prompt with the tokens and pictures of an earlier one, but another expected answer."""

    id: str
    answer: str
    earlier_id: str
    """Id of the first such prompt."""
    earlier_answer: str


@dataclass
class Duplicates:
    """Rows with the tokens and pictures of an earlier row of the source."""

    rows: int = 0
    first: tuple[str, str] | None = None
    """Ids of the first such row, and of the earlier one."""
    contradicting: int = 0
    """Number of those whose expected answer is another one than that of the earlier row."""
    contradictions: list[Contradiction] = field(default_factory=list)
    """The first ones."""


def duplicates_of(source: Source[Any], content: ContentOf) -> Duplicates:
    """Return the duplicates of a source. Answers are compared without white space around them;
    texts and pairs have none."""
    found = Duplicates()
    seen: dict[bytes, int] = {}
    for place, digest in enumerate(hashes_of(source.items, content)):
        earlier = seen.setdefault(digest, place)
        if earlier == place:
            continue
        found.rows += 1
        row, known = source.items[place], source.items[earlier]
        found.first = found.first or (row.id, known.id)
        if not isinstance(row, Prompt) or row.answer.strip() == known.answer.strip():
            continue
        found.contradicting += 1
        if len(found.contradictions) < SHOWN:
            found.contradictions.append(Contradiction(row.id, row.answer, known.id, known.answer))
    return found
