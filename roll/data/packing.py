"""Packing of sequences into as few rows with a token budget (bins) as possible."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assign each position in `lengths` to one bin of at most `capacity` tokens; return the bins.

    The algorithm is best fit, longest first: each sequence goes to the bin with the least
    sufficient room. If the result has more bins than the total number of tokens requires, first fit
    is tried as well, and the result with fewer bins is returned. So there are never more bins than
    with first fit decreasing. Equal lengths keep their order, so the result depends only on the
    arguments.

    Raises:
        ValueError: a length is above `capacity`, or not positive.
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
    """Put each row, in `order`, into the bin with the least room that holds it, or a new one;
    return the rows of each bin."""
    bins: list[list[int]] = []
    # Free room of the open bins, ascending, and the number of the bin at the same index.
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
    """Put each row, in `order`, into the first bin with enough room; return the rows of each bin.

    A binary tree, whose nodes hold the largest room below them, finds this bin by bisection.
    """
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
