"""Division of a batch into micro-batches by a token budget."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import torch

from roll.core.batches import TokenBatch
from roll.core.pictures import patches_of_rows
from roll.data.packing import pack

B = TypeVar("B", bound=TokenBatch)

PASS_COST = 1 / 32
"""Estimated cost of one more pass, as a fraction of the token budget."""
MIN_PASS_COST_TOKENS = 128
"""Minimum of that cost, in tokens: even a small pass launches every kernel of the model."""


def plan_of(
    batch: TokenBatch, max_tokens: int, *, packed: bool = False, border: int | None = None
) -> list[list[int]]:
    """Return `plan` for the rows of a batch and the patches of their pictures.

    Args:
        border: number of tokens up to which rows go into other micro-batches than longer ones, as
            far as rows that must stay together allow it; None: none does.
    """
    lengths = batch.lengths.tolist()
    patches = patches_of_rows(batch.pictures, len(batch))
    planned = partial(plan, max_tokens=max_tokens, unit=batch.unit, packed=packed)
    if border is None or max(lengths) <= border:
        return planned(lengths, patches=patches)
    units = [range(row, row + batch.unit) for row in range(0, len(lengths), batch.unit)]
    found = []
    for above in (True, False):
        kept = [row for u in units if (max(lengths[r] for r in u) > border) is above for row in u]
        parts = planned([lengths[r] for r in kept], patches=[patches[r] for r in kept])
        found += [[kept[i] for i in part] for part in parts]
    return found


def plan(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    unit: int = 1,
    packed: bool = False,
    patches: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the row indices of each micro-batch; every row is in exactly one micro-batch.

    A micro-batch holds at most `max_tokens` tokens, padding included; a patch of a picture counts
    as a token, in addition to the tokens that stand for the picture in its row. A unit that has
    more gets a micro-batch of its own. The plan depends on the arguments alone.

    Args:
        lengths: number of tokens of each row; the number of rows is a multiple of `unit`.
        unit: number of consecutive rows that must stay together (`Batch.unit`).
        packed: the rows of a micro-batch are joined into one, so there is no padding.
        patches: number of patches of each row; None: there are none.
    """
    patches = [0] * len(lengths) if patches is None else patches
    starts = range(0, len(lengths), unit)
    units = [lengths[row : row + unit] for row in starts]
    seen = [sum(patches[row : row + unit]) for row in starts]
    if packed:
        totals = [sum(each) + more for each, more in zip(units, seen, strict=True)]
        fit = [i for i, total in enumerate(totals) if total <= max_tokens]
        parts = [[i] for i, total in enumerate(totals) if total > max_tokens]
        parts += [[fit[i] for i in part] for part in pack([totals[i] for i in fit], max_tokens)]
    else:
        longest = [max(each) for each in units]
        parts = _plan_padded(longest, [-(-more // unit) for more in seen], max_tokens // unit)
    return [[one * unit + i for one in part for i in range(unit)] for part in parts]


def _plan_padded(
    lengths: Sequence[int], patches: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Plan micro-batches of padded rows, longest rows first.

    Rows of similar length go together, which keeps padding small. The number of rows times the
    length of the longest row, plus all patches, is at most `max_tokens`; a longer row gets a
    micro-batch of its own. A micro-batch also ends where the padding of further rows would cost
    more than another pass. Rows of equal length keep their order, so the plan depends on the
    arguments alone.
    """
    pass_cost = max(max_tokens * PASS_COST, MIN_PASS_COST_TOKENS)
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    parts: list[list[int]] = []
    seen = 0  # patches of the last part
    for done, row in enumerate(order):
        seen += patches[row]
        if parts:
            longest = lengths[parts[-1][0]]
            room = (max_tokens - seen) // longest - len(parts[-1])
            padding = min(room, len(order) - done) * (longest - lengths[row])
            if room > 0 and padding <= pass_cost:
                parts[-1].append(row)
                continue
        parts.append([row])
        seen = patches[row]
    return parts


def take(batch: B, rows: Sequence[int]) -> B:
    """Select rows of a batch and trim them to the longest one; padding tokens become 0.

    In a batch, padding may hold any value, but the embedding layer accepts only token ids.
    """
    part = batch.select(rows)
    part = part.trim(int(part.lengths.max()))
    at = torch.arange(part.tokens.shape[1])
    part.tokens.masked_fill_(at >= part.lengths[:, None], 0)  # `select` copied them
    return part
