"""Context parallelism: ranks that share the tokens of every row.

A row is one sequence, or several that are packed. Each sequence is 2 cp pieces of equal length, of
which rank r has the pieces r and 2 cp - 1 - r, as Megatron-Core cuts rotary angles; its part of a
row are its pieces of the first sequence, then those of the second, and so on. In attention the
ranks exchange tokens for heads (Ulysses, arXiv 2309.14509): each has all tokens of some heads.
Nothing else mixes tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor


def pieces_of(rank: int, ranks: int) -> tuple[int, int]:
    """Return the numbers of the pieces of a sequence that a rank has."""
    return rank, 2 * ranks - 1 - rank


def positions_of(lengths: Sequence[int], rank: int, ranks: int) -> Tensor:
    """Return the positions in the row of a rank's tokens, in order, int64 `[T / ranks]`.

    Args:
        lengths: numbers of tokens of the sequences of a row; 2 * ranks divides each.
    """
    lengths_S = torch.tensor(lengths)
    starts_S, piece_S = lengths_S.cumsum(0) - lengths_S, lengths_S // (2 * ranks)
    begins_S2 = torch.stack([starts_S + n * piece_S for n in pieces_of(rank, ranks)], dim=1)
    sizes_P = piece_S.repeat_interleave(2)
    places_P = sizes_P.cumsum(0) - sizes_P
    shifts_T = (begins_S2.flatten() - places_P).repeat_interleave(sizes_P)
    return shifts_T + torch.arange(len(shifts_T))


def positions_here(
    lengths: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """Return the positions in the row of this rank's tokens, int64 `[T / ranks]`.

    Args:
        lengths: numbers of tokens of the sequences of a row; 2 * ranks divides each.
        group: ranks that share rows, in order.
    """
    if group.size() == 1:
        return torch.arange(sum(lengths), device=device)
    return positions_of(lengths, group.rank(), group.size()).to(device)


def cut(rows_BT: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return this rank's tokens of rows, `[B, T / ranks]`.

    Args:
        lengths: numbers of tokens of the sequences of each row; 2 * ranks divides each.
    """
    return rows_BT[:, positions_here(lengths, group, rows_BT.device)]


def places_here(
    positions_N: Tensor, lengths: Sequence[int], group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Find the tokens of a row that this rank has.

    Args:
        positions_N: positions of tokens in their rows, int64.
        lengths: numbers of tokens of the sequences of each row; 2 * ranks divides each.

    Returns:
        Indices, into `positions_N`, of the tokens that this rank has, and the places of these
        tokens among its own of the row, int64 `[M]` each.
    """
    own = positions_here(lengths, group, positions_N.device)
    place_T = positions_N.new_full((sum(lengths),), -1)
    place_T[own] = torch.arange(len(own), device=own.device)
    place_N = place_T[positions_N]
    mine_M = (place_N >= 0).nonzero().flatten()
    return mine_M, place_N[mine_M]


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


def to_heads(part: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange tokens for heads. A collective.

    Args:
        part: `[T / ranks, ..., heads, width]`. If there are fewer heads than ranks, several ranks
            get the same head.
        lengths: numbers of tokens of the sequences of a row; 2 * ranks divides each.

    Returns:
        `[T, ..., heads / ranks, width]`, with the tokens of a row in order.
    """
    repeats = group.size() // part.shape[-2]
    if repeats > 1:
        part = part.repeat_interleave(repeats, dim=-2)
    held_T, order_T = _orders(tuple(lengths), group.size(), part.device)
    found: Tensor = _Reordered.apply(_exchanged(part, group, -2, 0), order_T, held_T)
    return found


def to_tokens(whole: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Reverse `to_heads`, but for repeated heads: return `[T / ranks, ..., heads, width]` of
    `[T, ..., heads / ranks, width]`. A collective."""
    held_T, order_T = _orders(tuple(lengths), group.size(), whole.device)
    return _exchanged(_Reordered.apply(whole, held_T, order_T), group, 0, -2)


@lru_cache(maxsize=4)  # the layers of a model ask for the same again
def _orders(lengths: tuple[int, ...], ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positions in the row of the tokens of all ranks, one rank after the other, and the
    place among these of each token of the row, int64 `[T]` each."""
    held_T = torch.cat([positions_of(lengths, rank, ranks) for rank in range(ranks)])
    return held_T.to(device), held_T.argsort().to(device)


class _Reordered(torch.autograd.Function):
    """Tokens in another order; without an addition of gradients, as each comes once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order_T: Tensor, back_T: Tensor) -> Tensor:
        """Return `x`, whose first axis are tokens, in the order `order_T`, which `back_T`
        reverses."""
        ctx.back_T = back_T
        return x.index_select(0, order_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.back_T), None, None


def _exchanged(x: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
    """Send rank i the i-th part of `x` along axis `cut`; join those received along axis `join`."""
    theirs: Tensor = all_to_all(group, torch.stack(x.chunk(group.size(), dim=cut)))
    return torch.cat(theirs.unbind(), dim=join)
