"""An order of rows whose equal consecutive parts hold about equally many tokens."""

from __future__ import annotations

from collections.abc import Sequence


def balanced_order(lengths: Sequence[int], parts: int) -> list[int]:
    """Row numbers, ordered so that `parts` equal consecutive slices balance the sum of lengths.

    Rows are dealt in rounds of `parts`, longest first; in each round the longest row goes to the
    lightest part. The totals of two parts then differ by at most max(lengths) - min(lengths).
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
    return [row for part in members for row in sorted(part)]
