"""An order of rows whose equal consecutive parts hold about equally many tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

MAX_SWAPS_PER_PART = 8
"""Far more than it takes; a bound, so that a step never waits for it."""


def balanced_order(lengths: Sequence[int], parts: int) -> list[int]:
    """Row numbers, ordered so that `parts` equal consecutive slices balance the sum of lengths.

    Rows are dealt in rounds of `parts`, longest first; in each round the longest row goes to the
    lightest part. The totals of two parts then differ by at most max(lengths) - min(lengths). After
    that the heaviest part swaps rows with the lightest as long as that brings both closer.
    The result depends on the lengths alone. Within a part rows keep their order.

    Example: balanced_order([9, 1, 5, 5], 2) == [0, 1, 2, 3]; both halves hold 10 tokens.

    Raises:
        ValueError: the rows do not divide into `parts`.
    """
    if parts < 1 or len(lengths) % parts:
        raise ValueError(f"{len(lengths)} rows do not divide into {parts} equal parts")
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    members: list[list[int]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for start in range(0, len(lengths), parts):
        lightest_first = sorted(range(parts), key=lambda part: (totals[part], part))
        for row, part in zip(longest_first[start : start + parts], lightest_first, strict=True):
            members[part].append(row)
            totals[part] += lengths[row]
    for _ in range(MAX_SWAPS_PER_PART * parts):
        heavy, light = totals.index(max(totals)), totals.index(min(totals))
        swap = _best_swap(lengths, members[heavy], members[light], totals[heavy] - totals[light])
        if swap is None:
            break
        i, j, moved = swap
        members[heavy][i], members[light][j] = members[light][j], members[heavy][i]
        totals[heavy] -= moved
        totals[light] += moved
    return [row for part in members for row in sorted(part)]


def _best_swap(
    lengths: Sequence[int], heavy: Sequence[int], light: Sequence[int], gap: int
) -> tuple[int, int, int] | None:
    """Positions of the two rows whose swap moves closest to half of `gap`, and what it moves."""
    by_length = sorted(range(len(light)), key=lambda j: lengths[light[j]])
    known = [lengths[light[j]] for j in by_length]
    best: tuple[int, int, int] | None = None
    for i, row in enumerate(heavy):
        wanted = lengths[row] - gap / 2
        at = bisect_left(known, wanted)
        for near in (at - 1, at):
            if not 0 <= near < len(known):
                continue
            moved = lengths[row] - known[near]
            if 0 < moved < gap and (best is None or abs(moved - gap / 2) < abs(best[2] - gap / 2)):
                best = (i, by_length[near], moved)
    return best
