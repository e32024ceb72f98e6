"""Sequences of different lengths in one row, that do not see each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """One row of sequences, one after the other, then padding that is a sequence of its own."""

    tokens_BT: Tensor
    """[1, tokens]"""
    positions_BT: Tensor
    """[1, tokens], from 0 in every sequence."""
    lengths: tuple[int, ...]
    """Without the padding."""
    params: PackedSeqParams
    """For `GPTModel.forward(..., packed_seq_params=...)`, on every pipeline stage."""

    def split(self, values_T: Tensor) -> list[Tensor]:
        """Values of all tokens, [tokens, ...], as one tensor for each sequence."""
        return list(values_T[: sum(self.lengths)].split(list(self.lengths)))


def pack(
    sequences: Sequence[Tensor],
    *,
    multiple: int = 1,
    length: int | None = None,
    padding_token: int = 0,
) -> Packed:
    """
    Args:
        sequences: tokens [T] each.
        multiple: the row's length is made to divide by it (tp, with sequence parallelism).
        length: of the row, where micro-batches of a pipeline must have the same.
        padding_token: of no influence on the others.

    Raises:
        ValueError: there are no sequences, one is empty, or they are longer than `length`.
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
    filling = torch.full((row - used,), padding_token, dtype=sequences[0].dtype, device=device)
    bounds = torch.tensor([0, *with_padding], device=device).cumsum(0).to(torch.int32)
    longest = max(with_padding)
    return Packed(
        tokens_BT=torch.cat([*sequences, filling])[None],
        positions_BT=torch.cat([torch.arange(n, device=device) for n in with_padding])[None],
        lengths=tuple(lengths),
        params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
    )
