"""Packed sequences: sequences of different lengths in one row that do not see each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """Sequences one after the other in one row, then padding that is a sequence of its own."""

    tokens_BT: Tensor
    """Token ids, `[1, tokens]`."""
    positions_BT: Tensor
    """Positions, `[1, tokens]`, counted from 0 in every sequence."""
    lengths: tuple[int, ...]
    """Number of tokens of each sequence, without the padding."""
    params: PackedSeqParams
    """Value of `packed_seq_params` in `GPTModel.forward`, needed on every pipeline stage."""

    def split(self, values_T: Tensor) -> list[Tensor]:
        """Split values `[tokens, ...]` into one tensor per sequence; drop those of the padding."""
        return list(values_T[: sum(self.lengths)].split(list(self.lengths)))


def pack(sequences: Sequence[Tensor], *, multiple: int = 1, length: int | None = None) -> Packed:
    """Pack sequences into one row.

    Args:
        sequences: token ids, `[T]` each.
        multiple: the length of the row is made a multiple of this number (tp, with sequence
            parallelism).
        length: length of the row, for pipelines whose micro-batches must have the same length;
            None: as short as possible.

    Raises:
        ValueError: there are no sequences, one is empty, they are longer than `length`, or `length`
            is not a multiple of `multiple`.
    """
    lengths = [len(tokens_T) for tokens_T in sequences]
    if not lengths or min(lengths) == 0:
        raise ValueError(f"sequences of {lengths} tokens; expected at least one, none empty")
    used = sum(lengths)
    row = -(-used // multiple) * multiple if length is None else length
    if row < used or row % multiple:
        raise ValueError(
            f"{used} tokens do not fit a row of {row}, or it does not divide by {multiple}"
        )
    with_padding = [*lengths, row - used] if row > used else lengths
    device = sequences[0].device
    filling = torch.zeros(row - used, dtype=sequences[0].dtype, device=device)
    return Packed(
        tokens_BT=torch.cat([*sequences, filling])[None],
        positions_BT=torch.cat([torch.arange(n, device=device) for n in with_padding])[None],
        lengths=tuple(lengths),
        params=_bounds(with_padding, device),
    )


def _bounds(lengths: Sequence[int], device: torch.device) -> PackedSeqParams:
    """Return the bounds of sequences of these lengths in a row, for Megatron-Core's attention."""
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
