"""Format operators: full Hugging Face tensors <-> one full Megatron tensor.

Both directions, no collectives, no state; each is the exact inverse of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What operators need to know of a model."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    num_experts: int = 0
    tied: bool = False
    """Whether the output layer is the embedding."""


class FormatOp(Protocol):
    """Named tensors are patterns: `*` is the layer, `@` the expert."""

    @property
    def mcore(self) -> str: ...

    @property
    def hf(self) -> tuple[str, ...]: ...

    def to_mcore(self, hf: Sequence[Tensor], shape: Shape) -> Tensor: ...

    def to_hf(self, mcore: Tensor, shape: Shape) -> list[Tensor]: ...


@dataclass(frozen=True)
class Rename:
    """The same tensor under another name."""

    mcore: str
    source: str

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.source,)

    def to_mcore(self, hf: Sequence[Tensor], shape: Shape) -> Tensor:
        return hf[0]

    def to_hf(self, mcore: Tensor, shape: Shape) -> list[Tensor]:
        return [mcore]


@dataclass(frozen=True)
class Transpose:
    """Hugging Face `[in, out]`, Megatron `[out, in]`."""

    mcore: str
    source: str

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.source,)

    def to_mcore(self, hf: Sequence[Tensor], shape: Shape) -> Tensor:
        return hf[0].transpose(0, 1)

    def to_hf(self, mcore: Tensor, shape: Shape) -> list[Tensor]:
        return [mcore.transpose(0, 1)]


@dataclass(frozen=True)
class FuseQKV:
    """q, k, v <-> `[q..q k v]` per KV group. Weights `[out, in]` and biases `[out]` alike."""

    mcore: str
    hf: tuple[str, ...]

    def to_mcore(self, hf: Sequence[Tensor], shape: Shape) -> Tensor:
        groups = [part.reshape(shape.num_kv_heads, -1, *part.shape[1:]) for part in hf]
        return torch.cat(groups, dim=1).flatten(0, 1)

    def to_hf(self, mcore: Tensor, shape: Shape) -> list[Tensor]:
        groups, width = shape.num_kv_heads, shape.head_dim
        queries = shape.num_heads // groups * width
        parts = mcore.reshape(groups, queries + 2 * width, *mcore.shape[1:])
        return [part.flatten(0, 1) for part in parts.split([queries, width, width], dim=1)]


@dataclass(frozen=True)
class FuseGateUp:
    """gate, up <-> one above the other."""

    mcore: str
    hf: tuple[str, ...]

    def to_mcore(self, hf: Sequence[Tensor], shape: Shape) -> Tensor:
        return torch.cat(tuple(hf))

    def to_hf(self, mcore: Tensor, shape: Shape) -> list[Tensor]:
        return list(mcore.chunk(2))


@dataclass(frozen=True)
class Unweave:
    """gate and up in alternating columns or entries <-> one above the other (gpt_oss).

    Hugging Face has weights as `[in, 2 * out]`, Megatron `[2 * out, in]`; biases are `[2 * out]`.
    """

    mcore: str
    source: str

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.source,)

    def to_mcore(self, hf: Sequence[Tensor], shape: Shape) -> Tensor:
        rows = hf[0].transpose(0, 1) if hf[0].dim() == 2 else hf[0]
        return torch.cat([rows[0::2], rows[1::2]])

    def to_hf(self, mcore: Tensor, shape: Shape) -> list[Tensor]:
        rows = torch.stack(mcore.chunk(2), dim=1).flatten(0, 1)
        return [rows.transpose(0, 1) if rows.dim() == 2 else rows]
