"""Order of rows whose equal consecutive parts hold about equally many tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

MAX_SWAPS_PER_PART = 8
"""Limit of swaps per part, far above what is needed; it only bounds the time in the worst case."""


def balanced_order(lengths: Sequence[int], parts: int) -> list[int]:
    """Return row numbers whose `parts` equal consecutive slices have similar sums of lengths.

    Rows are assigned in rounds of `parts`, longest first; in each round the longest row goes to the
    part with the smallest sum. The sums of two parts then differ by at most max(lengths) -
    min(lengths). After that, the parts with the largest and the smallest sum swap two rows, as long
    as this brings their sums closer. The result depends on the lengths only. The rows of a part
    keep their order.

    Example: balanced_order([9, 1, 5, 5], 2) == [0, 1, 2, 3]; both halves hold 10 tokens.

    Raises:
        ValueError: the number of rows is not divisible by `parts`, or `parts` is below 1.
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
    """Return positions in `heavy` and `light` of the best swap, and the tokens that the swap moves.

    The best swap moves a number of tokens closest to half of `gap`. The result is None if no swap
    brings the two parts closer.

    Args:
        lengths: number of tokens of each row.
        heavy, light: row numbers of the two parts.
        gap: tokens of `heavy` minus tokens of `light`.
    """
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
