"""Context parallelism: ranks that share the tokens of every row.

A row of T tokens is 2 cp pieces of equal length. Rank r has the pieces r and 2 cp - 1 - r, as
Megatron-Core cuts rotary angles. In attention the ranks exchange tokens for heads (Ulysses, arXiv
2309.14509): each has all tokens of some heads. Nothing else mixes tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor


def pieces_of(rank: int, ranks: int) -> tuple[int, int]:
    """Return the numbers of the pieces of a row that a rank has."""
    return rank, 2 * ranks - 1 - rank


def positions_here(length: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Return the positions in the row of a rank's tokens, int64.

    Args:
        length: number of the rank's tokens of a row.
        group: ranks that share rows, in order.
    """
    if group.size() == 1:
        return torch.arange(length, device=device)
    piece = length // 2
    starts = [number * piece for number in pieces_of(group.rank(), group.size())]
    return torch.cat([torch.arange(start, start + piece, device=device) for start in starts])


def cut(rows_BT: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's tokens of rows, `[B, T / ranks]`; 2 * ranks must divide T."""
    width = rows_BT.shape[1] // group.size()
    return rows_BT[:, positions_here(width, group, rows_BT.device)]


def places_here(positions: Tensor, width: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Find the tokens of a row that this rank has.

    Args:
        positions: positions of tokens in their rows, int64 `[N]`.
        width: number of this rank's tokens of a row.

    Returns:
        Indices, into `positions`, of the tokens that this rank has, and the places of these tokens
        among its own of the row, int64 `[M]` each.
    """
    piece = width // 2
    first, second = pieces_of(group.rank(), group.size())
    number = positions // piece
    mine_M = ((number == first) | (number == second)).nonzero().flatten()
    place_M = positions[mine_M] % piece + piece * (number[mine_M] == second)
    return mine_M, place_M


def joined(mine_M: Tensor, part_M: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    """Return the values of all ranks, `[size, ...]`, from those of this rank. A collective.

    Every rank must compute the same from the result: the gradient of a rank's values is that of
    the result, without a reduction.

    Args:
        mine_M: indices of this rank's values among all.
        part_M: this rank's values, `[M, ...]`.
    """
    empty = part_M.new_zeros(size, *part_M.shape[1:])
    found: Tensor = reduce_from_tensor_model_parallel_region(
        empty.index_put((mine_M,), part_M), group=group
    )
    return found


def to_heads(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange tokens for heads. A collective.

    Args:
        part: `[T / ranks, B, heads, width]`. If there are fewer heads than ranks, several ranks get
            the same head.

    Returns:
        `[T, B, heads / ranks, width]`, with the tokens of a row in order.
    """
    repeats = group.size() // part.shape[2]
    if repeats > 1:
        part = part.repeat_interleave(repeats, dim=2)
    return _in_order(_exchanged(part, group, 2, 0), _order(group.size()))


def to_tokens(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reverse `to_heads`, but for repeated heads: return `[T / ranks, B, heads, width]` of
    `[T, B, heads / ranks, width]`. A collective."""
    order = _order(group.size())
    back = [order.index(place) for place in range(len(order))]
    return _exchanged(_in_order(whole, back), group, 0, 2)


def _order(ranks: int) -> list[int]:
    """Return for each piece of a row its place where the ranks' tokens follow one another."""
    held = [number for rank in range(ranks) for number in pieces_of(rank, ranks)]
    return [held.index(number) for number in range(2 * ranks)]


def _in_order(whole: Tensor, order: Sequence[int]) -> Tensor:
    """Put the pieces of rows, whose tokens are the first axis, into this order."""
    pieces = whole.chunk(len(order), dim=0)
    return torch.cat([pieces[place] for place in order])


def _exchanged(x: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
    """Send rank i the i-th part of `x` along axis `cut`; join those received along axis `join`."""
    theirs: Tensor = all_to_all(group, torch.stack(x.chunk(group.size(), dim=cut)))
    return torch.cat(theirs.unbind(), dim=join)
