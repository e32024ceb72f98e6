"""Which sequences share a row: bins of a token budget, as few as can be."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Positions in `lengths`, in bins of at most `capacity` tokens; every position once.

    Best fit, longest first: each sequence goes to the bin that it fills most. Where that takes more
    bins than the tokens alone would need, first fit is tried too, and the better of both is taken,
    so there are never more bins than first fit decreasing needs. Equal lengths keep their order, so
    the result depends on the arguments alone.

    Raises:
        ValueError: a sequence is longer than `capacity`, or not positive.
    """
    for row, length in enumerate(lengths):
        if not 0 < length <= capacity:
            raise ValueError(
                f"sequence {row} has {length} tokens; a bin takes 1 to {capacity}: cut it, or "
                "raise the capacity"
            )
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    bins = _best_fit(lengths, order, capacity)
    if len(bins) > -(-sum(lengths) // capacity):
        bins = min(bins, _first_fit(lengths, order, capacity), key=len)
    return bins


def _best_fit(lengths: Sequence[int], order: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    # Open bins by the room that is left, tightest first; both lists move together.
    rooms: list[int] = []
    owners: list[int] = []
    for row in order:
        length = lengths[row]
        at = bisect_left(rooms, length)
        if at == len(rooms):
            bins.append([row])
            room, owner = capacity - length, len(bins) - 1
        else:
            room, owner = rooms.pop(at) - length, owners.pop(at)
            bins[owner].append(row)
        if room:
            at = bisect_left(rooms, room)
            rooms.insert(at, room)
            owners.insert(at, owner)
    return bins


def _first_fit(lengths: Sequence[int], order: Sequence[int], capacity: int) -> list[list[int]]:
    """The first bin with enough room, found by halving: a tree holds the largest room below it."""
    leaves = 1
    while leaves < len(lengths):
        leaves *= 2
    largest = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for row in order:
        length = lengths[row]
        node = 1
        while node < leaves:
            node *= 2
            if largest[node] < length:
                node += 1
        owner = node - leaves
        if owner == len(bins):
            bins.append([])
        bins[owner].append(row)
        largest[node] -= length
        while node > 1:
            node //= 2
            better = max(largest[2 * node], largest[2 * node + 1])
            if largest[node] == better:
                break
            largest[node] = better
    return bins
