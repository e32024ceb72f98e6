"""Rows shared by several ranks: each rank computes an equal slice of every row's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from roll.models import packing
from roll.models.vision.inputs import PictureInputs


@dataclass(frozen=True, slots=True)
class Slice:
    """Slice of rows `[B, T]` that one rank computes: W tokens of each row."""

    tokens_BW: Tensor
    mine_M: Tensor
    """Indices, into the N requested tokens, of the M tokens whose hidden states are in this slice,
    int64."""
    states_M: Tensor
    """Flat indices, into `tokens_BW`, of the hidden states for those M tokens, int64."""
    arguments: dict[str, Any]
    """Keyword arguments of the model's backbone."""
    pictures: PictureInputs | None
    """Pictures of the rows, of which this slice reads the features of its own placeholders."""


@dataclass(frozen=True, slots=True)
class SequenceShards:
    """The ranks that share the same rows.

    Each rank's backward pass computes a part of the gradient. The sum of the parts is the gradient
    of the rows.
    """

    group: dist.ProcessGroup
    """Ranks that share the rows, in the order of the slices."""
    sequence: dist.ProcessGroup | None
    """Ranks that exchange tokens for heads in attention (Ulysses). None if the attention of each
    rank sees whole rows."""
    tp: int
    """Number of consecutive ranks that share matrices (tensor parallelism). Before those matrices
    the slices of these ranks are joined; after them the result is cut again."""

    def cut(
        self,
        rows_BT: Tensor,
        positions_N: Tensor,
        lengths: Sequence[int] | None,
        target_shift: int,
        pictures: PictureInputs | None,
    ) -> Slice:
        """Return this rank's part; rows are padded so that all slices are equal.

        Args:
            positions_N: flat indices of the tokens that results are wanted of.
            lengths: number of tokens of each sequence, if the only row is packed.
            target_shift: as `TokenModel.target_shift`.
            pictures: pictures of the rows. Every rank runs the tower over all of them, and the
                gradients of the features that it uses are its part of the gradient.
        """
        width = rows_BT.shape[1]
        part = -(-width // self.group.size())
        more = part * self.group.size() - width
        first = part * self.group.rank()
        rows = pad(rows_BT, [0, more])
        attended = self._attended(part)
        row_N, column_N = positions_N // width, positions_N % width
        read_N = column_N - target_shift - first
        mine_M = ((read_N >= 0) & (read_N < part)).nonzero().flatten()
        return Slice(
            tokens_BW=rows[:, first : first + part],
            mine_M=mine_M,
            states_M=(row_N * part + read_N)[mine_M],
            arguments=self._arguments(width, more, lengths, attended, rows.device),
            pictures=None
            if pictures is None
            else pictures.cut(width, slice(first, first + part), attended),
        )

    def join(self, part_M: Tensor, mine_M: Tensor, size: int) -> Tensor:
        """Return the results of all ranks, `[size, ...]`, from those of this rank; collective.

        Args:
            part_M: results `[M, ...]` of this rank.
            mine_M: indices of these results among all results, int64.
            size: number of results of all ranks together.
        """
        empty_N = part_M.new_zeros(size, *part_M.shape[1:])
        whole_N: Tensor = _Join.apply(empty_N.index_put((mine_M,), part_M), self.group)
        return whole_N

    def _attended(self, part: int) -> slice:
        """Return the columns that attention has before it exchanges tokens.

        Args:
            part: number of columns of each rank.
        """
        size = part * self.tp
        first = size * (self.group.rank() // self.tp)
        return slice(first, first + size)

    def _arguments(
        self,
        width: int,
        more: int,
        lengths: Sequence[int] | None,
        attended: slice,
        device: torch.device,
    ) -> dict[str, Any]:
        """Return the model's arguments for this rank's slice of rows padded by `more` tokens."""
        # Tokens that were added to a packed row are a sequence of their own.
        sequences = [width + more] if lengths is None else [*lengths, *([more] if more else [])]
        arguments = packing.arguments(sequences, device)
        return {
            "position_ids": arguments["position_ids"][:, attended],
            "row_lengths": arguments["row_lengths"],
            "sequence_group": self.sequence,
        }


class _Join(torch.autograd.Function):
    """Sum of the tensors of all ranks.

    Every rank computes the same from the sum, so the incoming gradient is complete on each rank and
    needs no reduction.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = mine.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
