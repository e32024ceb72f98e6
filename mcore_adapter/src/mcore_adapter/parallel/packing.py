"""Packed sequences: sequences of different lengths in one row that do not see each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """Sequences one after the other in one row, then padding that is a sequence of its own.

    Where ranks share rows, each sequence has padding behind it, too.
    """

    tokens_BT: Tensor
    """Token ids, `[1, tokens]`; those of padding are 0."""
    positions_BT: Tensor
    """Positions, `[1, tokens]`, counted from 0 in every sequence."""
    lengths: tuple[int, ...]
    """Number of tokens of each sequence, without the padding."""
    spans: tuple[int, ...]
    """The same with the padding behind each sequence; last the padding of the row, if it has
    any."""
    params: PackedSeqParams
    """Value of `packed_seq_params` in `GPTModel.forward`, needed on every pipeline stage."""

    def split(self, values_T: Tensor) -> list[Tensor]:
        """Split values `[tokens, ...]` into one tensor per sequence; drop those of the padding."""
        parts = values_T.split(list(self.spans))
        return [part[:length] for part, length in zip(parts, self.lengths, strict=False)]

    @property
    def padding_BT(self) -> Tensor:
        """True at padding, bool `[1, tokens]`."""
        own_S = torch.tensor([*self.lengths, 0][: len(self.spans)])
        own_T = own_S.repeat_interleave(torch.tensor(self.spans))
        return self.positions_BT >= own_T.to(self.positions_BT.device)


def pack(
    sequences: Sequence[Tensor],
    *,
    multiple: int = 1,
    each_multiple: int = 1,
    length: int | None = None,
) -> Packed:
    """Pack sequences into one row.

    Args:
        sequences: token ids, `[T]` each.
        multiple: the length of the row is made a multiple of this number (tp, with sequence
            parallelism).
        each_multiple: padding makes each sequence a multiple of this number, and the row, too
            (2 cp, with context parallelism).
        length: length of the row, for pipelines whose micro-batches must have the same length;
            None: as short as possible.

    Raises:
        ValueError: there are no sequences, one is empty, they are longer than `length`, or `length`
            is not a multiple of `multiple` and `each_multiple`.
    """
    lengths = [len(tokens_T) for tokens_T in sequences]
    if not lengths or min(lengths) == 0:
        raise ValueError(f"sequences of {lengths} tokens; expected at least one, none empty")
    spans = [-(-each // each_multiple) * each_multiple for each in lengths]
    used, divisor = sum(spans), math.lcm(multiple, each_multiple)
    row = -(-used // divisor) * divisor if length is None else length
    if row < used or row % divisor:
        raise ValueError(
            f"{used} tokens do not fit a row of {row}, or it does not divide by {divisor}"
        )
    device = sequences[0].device
    tokens_T = sequences[0].new_zeros(row)
    for tokens, start in zip(sequences, itertools.accumulate([0, *spans]), strict=False):
        tokens_T[start : start + len(tokens)] = tokens
    spans += [row - used] if row > used else []
    return Packed(
        tokens_BT=tokens_T[None],
        positions_BT=torch.cat([torch.arange(n, device=device) for n in spans])[None],
        lengths=tuple(lengths),
        spans=tuple(spans),
        params=_bounds(spans, device),
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
