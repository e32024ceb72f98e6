"""Format operators: conversion between full Hugging Face tensors and one full Megatron tensor.

An operator has both directions, and each is the exact inverse of the other. Operators need no
collectives and keep no state. They move values and compute nothing, so they work on numpy arrays
and torch tensors of any data type. An operator that does not transpose a weight accepts any length
of its last dimension, so that it also converts the B factors of LoRA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mcore_adapter.convert.arrays import A, cut, join


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model that operators need."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    num_experts: int = 0
    tied: bool = False
    """True if the output layer shares its weight with the embedding."""


class FormatOp(Protocol):
    """Interface of an operator.

    Names of tensors are patterns in which `*` stands for the layer and `@` for the expert.
    """

    @property
    def mcore(self) -> str:
        """Megatron name."""
        ...

    @property
    def hf(self) -> tuple[str, ...]:
        """Hugging Face names, in the order that `to_mcore` takes the tensors."""
        ...

    def to_mcore(self, hf: Sequence[A], shape: Shape) -> A:
        """Return the Megatron tensor that is made of Hugging Face tensors.

        Args:
            hf: tensors in the order of the property `hf`, each in full and not one rank's shard.
        """
        ...

    def to_hf(self, mcore: A, shape: Shape) -> list[A]:
        """Return the Hugging Face tensors of which a Megatron tensor is made: undo `to_mcore`.

        Args:
            mcore: tensor in full, not one rank's shard.
        """
        ...


@dataclass(frozen=True)
class FromOne:
    """Part of operators that make a tensor of a single one."""

    mcore: str
    source: str

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.source,)


@dataclass(frozen=True)
class Rename(FromOne):
    """Operator for a tensor that differs only in its name."""

    def to_mcore(self, hf: Sequence[A], shape: Shape) -> A:
        return hf[0]

    def to_hf(self, mcore: A, shape: Shape) -> list[A]:
        return [mcore]


@dataclass(frozen=True)
class Transpose(FromOne):
    """Operator for a weight that is `[in, out]` in Hugging Face and `[out, in]` in Megatron."""

    def to_mcore(self, hf: Sequence[A], shape: Shape) -> A:
        return hf[0].swapaxes(0, 1)

    def to_hf(self, mcore: A, shape: Shape) -> list[A]:
        return [mcore.swapaxes(0, 1)]


@dataclass(frozen=True)
class FuseQKV:
    """Operator that fuses q, k and v into one tensor, for weights `[out, in]` and biases `[out]`.

    The rows of the Megatron tensor are `[q..q k v]` for each key-value group: all queries of the
    group, then its key, then its value. If `gated`, Hugging Face's q_proj has for each head a query
    followed by a gate, and the rows of the Megatron tensor are `[q..q g..g k v]` for each group.
    Layers whose values are their keys have no v, here and there.
    """

    mcore: str
    hf: tuple[str, ...]
    gated: bool = False
    own: Shape | None = None
    """Sizes of the heads, if they are not those of the model's other layers."""

    def to_mcore(self, hf: Sequence[A], shape: Shape) -> A:
        sizes, rest = self.own or shape, hf[0].shape[1:]
        groups, width = sizes.num_kv_heads, sizes.head_dim
        queries, *others = (part.reshape(groups, -1, *rest) for part in hf)
        if self.gated:
            # [groups, heads of a group, (query, gate), width]
            pairs = queries.reshape(groups, -1, 2, width, *rest)
            queries = pairs.swapaxes(1, 2).reshape(groups, -1, *rest)
        return join([queries, *others], 1).reshape(-1, *rest)

    def to_hf(self, mcore: A, shape: Shape) -> list[A]:
        sizes, rest = self.own or shape, mcore.shape[1:]
        groups, width = sizes.num_kv_heads, sizes.head_dim
        queries = sizes.num_heads // groups * width * (2 if self.gated else 1)
        lengths = [queries] + [width] * (len(self.hf) - 1)
        grouped = mcore.reshape(groups, sum(lengths), *rest)
        query, *others = cut(grouped, lengths, 1)
        if self.gated:
            query = query.reshape(groups, 2, -1, width, *rest).swapaxes(1, 2)
        return [part.reshape(-1, *rest) for part in (query, *others)]


@dataclass(frozen=True)
class RegroupQKV(FromOne):
    """Operator between a tensor of all queries, all keys, all values and `[q..q k v]` per group."""

    def to_mcore(self, hf: Sequence[A], shape: Shape) -> A:
        width = shape.head_dim
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        parts = cut(hf[0], [count * width for count in heads])
        return self._fuse().to_mcore(parts, shape)

    def to_hf(self, mcore: A, shape: Shape) -> list[A]:
        return [join(self._fuse().to_hf(mcore, shape))]

    def _fuse(self) -> FuseQKV:
        return FuseQKV(self.mcore, ("q", "k", "v"))


@dataclass(frozen=True)
class FuseGateUp:
    """Operator that stacks gate and up into one tensor, the rows of gate first."""

    mcore: str
    hf: tuple[str, ...]

    def to_mcore(self, hf: Sequence[A], shape: Shape) -> A:
        return join(hf)

    def to_hf(self, mcore: A, shape: Shape) -> list[A]:
        half = mcore.shape[0] // 2
        return [mcore[:half], mcore[half:]]


@dataclass(frozen=True)
class Deinterleave(FromOne):
    """Operator that separates alternating gate and up (gpt_oss).

    Hugging Face has gate and up in alternating columns of a weight `[in, 2 * out]`, or in
    alternating entries of a bias `[2 * out]`. Megatron has all of gate first, then all of up, as
    rows of a weight `[2 * out, in]` or entries of a bias `[2 * out]`.
    """

    def to_mcore(self, hf: Sequence[A], shape: Shape) -> A:
        rows = hf[0].swapaxes(0, 1) if hf[0].ndim == 2 else hf[0]
        return join([rows[0::2], rows[1::2]])

    def to_hf(self, mcore: A, shape: Shape) -> list[A]:
        rest, half = mcore.shape[1:], mcore.shape[0] // 2
        rows = mcore.reshape(2, half, *rest).swapaxes(0, 1).reshape(-1, *rest)
        return [rows.swapaxes(0, 1) if rows.ndim == 2 else rows]


@dataclass(frozen=True)
class RegroupByKind:
    """Operator that groups rows by kind in Megatron, by head in Hugging Face (qwen3_next).

    Each Hugging Face tensor consists of `groups` groups of rows, and each group has rows of several
    kinds. The Megatron tensor has all rows of the first kind from all groups, then all rows of the
    second kind, and so on: q, k, v, z of in_proj_qkvz, then b, a of in_proj_ba.
    """

    mcore: str
    hf: tuple[str, ...]
    groups: int
    """Number of groups in each Hugging Face tensor."""
    kinds: tuple[tuple[int, ...], ...]
    """Number of rows of each kind in one group, one tuple for each tensor of `hf`."""

    def to_mcore(self, hf: Sequence[A], shape: Shape) -> A:
        rest = hf[0].shape[1:]
        parts = [
            part.reshape(-1, *rest)
            for source, lengths in zip(hf, self.kinds, strict=True)
            for part in cut(source.reshape(self.groups, -1, *rest), lengths, 1)
        ]
        return join(parts)

    def to_hf(self, mcore: A, shape: Shape) -> list[A]:
        rest = mcore.shape[1:]
        lengths = [length * self.groups for kinds in self.kinds for length in kinds]
        parts = iter(cut(mcore, lengths))
        return [
            join([next(parts).reshape(self.groups, -1, *rest) for _ in kinds], 1).reshape(-1, *rest)
            for kinds in self.kinds
        ]


@dataclass(frozen=True)
class JoinRows:
    """Operator that stacks several tensors into one, in the order of `hf` (qwen3_5)."""

    mcore: str
    hf: tuple[str, ...]
    lengths: tuple[int, ...]
    """Number of rows of each tensor of `hf`."""

    def to_mcore(self, hf: Sequence[A], shape: Shape) -> A:
        return join(hf)

    def to_hf(self, mcore: A, shape: Shape) -> list[A]:
        return cut(mcore, self.lengths)


OrdersRows = FuseQKV | FuseGateUp | JoinRows | RegroupQKV | Rename
"""Operators that only order and join rows, as LoRA's factors B need."""
