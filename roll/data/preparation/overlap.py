"""Rows of validation sets that are in the training data, too."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from roll.core.errors import DataError
from roll.data.datasets import Dataset, Item, Source, SourceReport, fingerprint
from roll.data.store.making import content_hash
from roll.data.store.rows import StoredRows

log = logging.getLogger(__name__)

Row = TypeVar("Row", bound=Item)
Rule = Literal["warn", "drop", "refuse"]
"""Values of `data.overlap`."""
ContentOf = Callable[[Any], tuple[Sequence[Sequence[int]], Sequence[str]]]
"""Function that returns the tokens of a row, of a prompt or of each sequence, and the identities of
its pictures."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Rows of one training source whose tokens and pictures are those of a row of one validation
    set."""

    source: str
    held_out: str
    places: tuple[int, ...]
    """Places of these rows in the training source."""
    rows: int
    """Number of rows of the validation set that are among them."""
    first: tuple[str, str]
    """Ids of the first such row of the source, and of that of the validation set."""

    def __str__(self) -> str:
        return (
            f"{self.rows} rows of validation set {self.held_out} are in training source "
            f"{self.source}, too, with the same tokens (first: {self.first[1]} is {self.first[0]})"
        )


def without_overlap(
    train: Dataset[Row],
    held_out: Dataset[Row],
    rule: Rule,
    content_of: ContentOf,
    identity: Callable[[Row], list[Any]],
) -> Dataset[Row]:
    """Return the training data, without rows of validation sets if `rule` is `drop`.

    Args:
        identity: function that returns what the fingerprint covers of a row.

    Raises:
        DataError: there are such rows and `rule` is `refuse`; or no other rows are left.
    """
    found = overlaps(train, held_out, content_of)
    if not found:
        return train
    log.warning("%s", judged(found, rule))
    if rule == "warn":
        return train
    kept = without(train, found)
    reports = tuple(
        _without_rows(report, len(source.items))
        for report, source in zip(train.report, kept, strict=True)
    )
    return Dataset(kept, reports, fingerprint(kept, identity))


def _without_rows(report: SourceReport, kept: int) -> SourceReport:
    """Return the report on a source of which `kept` rows are left."""
    if kept == report.kept:
        return report
    overlapping = {"the tokens of a row of a validation set": report.kept - kept}
    return replace(report, kept=kept, left_out={**report.left_out, **overlapping})


def judged(found: Sequence[Overlap], rule: Rule) -> str:
    """Return a sentence about overlaps, of which there is at least one, and what becomes of them;
    DataError if `rule` is `refuse`."""
    told = "; ".join(map(str, found))
    if rule == "refuse":
        raise DataError(f"{told}; remove them, or set `data.overlap: drop`")
    if rule == "drop":
        return f"{told}; they are not trained on"
    return f"{told}; validation looks too good (`data.overlap: drop` leaves them out)"


def without(train: Dataset[Row], found: Sequence[Overlap]) -> tuple[Source[Row], ...]:
    """Return the training sources without the rows that overlap; DataError if one has no others."""
    sources = []
    for source in train.sources:
        places = {place for each in found if each.source == source.name for place in each.places}
        sources.append(_without(source, places))
        if not sources[-1].items:
            raise DataError(f"source {source.name}: all of its rows are in validation sets, too")
    return tuple(sources)


def overlaps(train: Dataset[Row], held_out: Dataset[Row], content_of: ContentOf) -> list[Overlap]:
    """Return the overlap of each training source with each validation set, where there is one."""
    found = []
    for held in held_out.sources:
        known: dict[bytes, int] = {}
        for place, digest in enumerate(hashes_of(held.items, content_of)):
            known.setdefault(digest, place)
        for source in train.sources:
            same = [
                (place, known[digest], digest)
                for place, digest in enumerate(hashes_of(source.items, content_of))
                if digest in known
            ]
            if same:
                first = (source.items[same[0][0]].id, held.items[same[0][1]].id)
                places = tuple(place for place, _, _ in same)
                rows = len({digest for _, _, digest in same})
                found.append(Overlap(source.name, held.name, places, rows, first))
    return found


def hashes_of(items: Sequence[Any], content_of: ContentOf) -> Iterator[bytes]:
    """Yield the hash of the tokens and pictures of each row."""
    if isinstance(items, StoredRows):
        data = items.hashes.tobytes()
        return (data[at : at + 16] for at in range(0, len(data), 16))
    return (content_hash(*content_of(item)) for item in items)


def _without(source: Source[Row], places: Iterable[int]) -> Source[Row]:
    """Return a source without the rows at these places."""
    gone = frozenset(places)
    if not gone:
        return source
    if isinstance(source.items, StoredRows):
        items = source.items.without(gone)
        return replace(source, items=items, digest=items.digest)
    return replace(
        source, items=tuple(each for i, each in enumerate(source.items) if i not in gone)
    )
