"""Division of a rank's rows into micro-batches whose shapes ranks can agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_adapter.train.data.micro_batches import balanced
from roll.strategy.training import microbatch


@dataclass(frozen=True)
class UnitSize:
    """Size of consecutive rows that must stay together (`Batch.unit`)."""

    longest: int
    """Number of tokens of the longest row."""
    patches: int
    """Number of patches of the pictures of all rows."""


NO_UNIT = UnitSize(0, 0)
"""Size of a unit that a rank does not have."""


@dataclass(frozen=True)
class Part:
    """Rows of a single micro-batch, and the shape that it has on all ranks that agree."""

    rows: list[int]
    """Indices of this rank's rows; empty if it has none for the micro-batch."""
    num_rows: int
    width: int
    """Number of tokens of the longest row on any of these ranks."""


def sizes_of_units(
    lengths: Sequence[int], patches: Sequence[int], unit: int
) -> tuple[list[int], list[UnitSize]]:
    """Return the first row of each unit, longest unit first, and the sizes in the same order.

    Args:
        lengths: number of tokens of each row; the number of rows is a multiple of `unit`.
        patches: number of patches of each row.
    """
    starts = range(0, len(lengths), unit)
    sizes = {
        row: UnitSize(max(lengths[row : row + unit]), sum(patches[row : row + unit]))
        for row in starts
    }
    order = sorted(starts, key=lambda row: -sizes[row].longest)
    return order, [sizes[row] for row in order]


def plan(
    starts: Sequence[int], sizes: Sequence[UnitSize], max_tokens: int, *, unit: int, equal: bool
) -> list[Part]:
    """Return the micro-batches of this rank; ranks with the same `sizes` get the same shapes.

    A shape is within the token budget, as `microbatch.plan` describes it.

    Args:
        starts: first row of each of this rank's units, longest unit first.
        sizes: for each place in that order, the largest size on any rank, so longest first, too; at
            least as many as this rank has units.
        unit: number of rows of a unit.
        equal: all micro-batches get the width and the number of rows of the largest.
    """
    if equal and sizes:
        sizes = [UnitSize(sizes[0].longest, each.patches) for each in sizes]
    units = microbatch.plan(
        [each.longest for each in sizes for _ in range(unit)],
        max_tokens,
        unit=unit,
        patches=[each.patches if i == 0 else 0 for each in sizes for i in range(unit)],
    )
    parts = []
    for rows in units:
        places = [row // unit for row in rows[::unit]]
        mine = [starts[place] for place in places if place < len(starts)]
        own = [start + i for start in mine for i in range(unit)]
        parts.append(Part(own, len(rows), max(sizes[place].longest for place in places)))
    if equal:
        most = max((each.num_rows for each in parts), default=0)
        parts = [Part(each.rows, most, each.width) for each in parts]
    return parts


def plan_packed(
    lengths: Sequence[int],
    patches: Sequence[int],
    max_tokens: int,
    *,
    unit: int,
    turns: int | None,
) -> list[Part]:
    """Return the micro-batches of this rank whose rows are packed into one, longest first.

    Args:
        lengths: number of tokens of each row; the number of rows is a multiple of `unit`.
        patches: number of patches of each row.
        max_tokens: largest number of tokens and patches of a micro-batch, unless a unit alone has
            more.
        unit: number of consecutive rows that must stay together (`Batch.unit`).
        turns: the number of micro-batches is a multiple of this, and all have the width of the
            longest, which is as short as possible; None: each has its own width.
    """
    if turns is None:
        parts = microbatch.plan(lengths, max_tokens, unit=unit, packed=True, patches=patches)
    elif lengths:
        starts = range(0, len(lengths), unit)
        loads = [sum(lengths[i : i + unit]) + sum(patches[i : i + unit]) for i in starts]
        found = balanced(loads, max(max_tokens, *loads), turns)
        parts = [[number * unit + i for number in part for i in range(unit)] for part in found]
    else:
        parts = []
    made = [Part(rows, 1, sum(lengths[row] for row in rows)) for rows in parts]
    widest = max((each.width for each in made), default=0)
    if turns is not None:
        return [Part(each.rows, 1, widest) for each in made]
    return sorted(made, key=lambda each: -each.width)
