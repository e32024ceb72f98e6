"""Micro-batches by token budget: which rows go through the model together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from roll.core.batches import TokenBatch
from roll.data.packing import pack

B = TypeVar("B", bound=TokenBatch)

PASS_COST = 1 / 32
"""What one more pass costs, as a share of the token budget."""
MIN_PASS_COST_TOKENS = 128
"""The same in tokens, at least: a pass starts every kernel of the model, however small it is."""


def plan(
    lengths: Sequence[int], max_tokens: int, *, unit: int = 1, packed: bool = False
) -> list[list[int]]:
    """Row indices of each micro-batch, every row once.

    A micro-batch holds at most `max_tokens`, its padding included; a longer unit goes alone. The
    plan depends on its arguments alone.

    Args:
        unit: consecutive rows that are not parted (`Batch.unit`).
        packed: rows stand behind each other, so there is no padding.
    """
    units = [lengths[row : row + unit] for row in range(0, len(lengths), unit)]
    if packed:
        totals = [sum(each) for each in units]
        fit = [i for i, total in enumerate(totals) if total <= max_tokens]
        parts = [[i] for i, total in enumerate(totals) if total > max_tokens]
        parts += [[fit[i] for i in part] for part in pack([totals[i] for i in fit], max_tokens)]
    else:
        parts = _plan_padded([max(each) for each in units], max_tokens // unit)
    return [[one * unit + i for one in part for i in range(unit)] for part in parts]


def _plan_padded(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Longest first.

    Rows of like length go together, so that little padding is computed. Rows times the longest of
    them is at most `max_tokens`; a longer row goes alone. A micro-batch also ends where the padding
    that its further rows would need costs more than another pass. Equal lengths keep their order,
    so the plan depends on nothing but its arguments.
    """
    pass_cost = max(max_tokens * PASS_COST, MIN_PASS_COST_TOKENS)
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    parts: list[list[int]] = []
    for done, row in enumerate(order):
        if parts:
            longest = lengths[parts[-1][0]]
            room = max_tokens // longest - len(parts[-1])
            padding = min(room, len(order) - done) * (longest - lengths[row])
            if room > 0 and padding <= pass_cost:
                parts[-1].append(row)
                continue
        parts.append([row])
    return parts


def take(batch: B, rows: Sequence[int]) -> B:
    """These rows, cut to the longest of them; tokens in the padding become 0.

    Padding may hold any value, but an embedding accepts only token ids.
    """
    part = batch.select(rows)
    part = part.trim(int(part.lengths.max()))
    at = torch.arange(part.tokens.shape[1])
    part.tokens.masked_fill_(at >= part.lengths[:, None], 0)  # `select` copied them
    return part
