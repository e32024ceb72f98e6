"""Format operators: full Hugging Face tensors <-> one full Megatron tensor.

Both directions, no collectives, no state; each is the exact inverse of the other. They move data
and compute nothing, so they serve numpy arrays and torch tensors of any type. The last dimension of
a weight that keeps its orientation may have any length: the B factors of LoRA go through, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mcore_adapter.convert.arrays import A, cut, join


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

    def to_mcore(self, hf: Sequence[A], shape: Shape) -> A: ...

    def to_hf(self, mcore: A, shape: Shape) -> list[A]: ...


@dataclass(frozen=True)
class Rename:
    """The same tensor under another name."""

    mcore: str
    source: str

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.source,)

    def to_mcore(self, hf: Sequence[A], shape: Shape) -> A:
        return hf[0]

    def to_hf(self, mcore: A, shape: Shape) -> list[A]:
        return [mcore]


@dataclass(frozen=True)
class Transpose:
    """Hugging Face `[in, out]`, Megatron `[out, in]`."""

    mcore: str
    source: str

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.source,)

    def to_mcore(self, hf: Sequence[A], shape: Shape) -> A:
        return hf[0].swapaxes(0, 1)

    def to_hf(self, mcore: A, shape: Shape) -> list[A]:
        return [mcore.swapaxes(0, 1)]


@dataclass(frozen=True)
class FuseQKV:
    """q, k, v <-> `[q..q k v]` per KV group. Weights `[out, in]` and biases `[out]` alike.

    With `gated`, q_proj holds a query and a gate per head, and Megatron `[q..q g..g k v]`.
    """

    mcore: str
    hf: tuple[str, ...]
    gated: bool = False

    def to_mcore(self, hf: Sequence[A], shape: Shape) -> A:
        rest = hf[0].shape[1:]
        groups, width = shape.num_kv_heads, shape.head_dim
        queries, key, value = (part.reshape(groups, -1, *rest) for part in hf)
        if self.gated:
            # [groups, heads of a group, (query, gate), width]
            pairs = queries.reshape(groups, -1, 2, width, *rest)
            queries = pairs.swapaxes(1, 2).reshape(groups, -1, *rest)
        return join([queries, key, value], 1).reshape(-1, *rest)

    def to_hf(self, mcore: A, shape: Shape) -> list[A]:
        rest = mcore.shape[1:]
        groups, width = shape.num_kv_heads, shape.head_dim
        queries = shape.num_heads // groups * width * (2 if self.gated else 1)
        grouped = mcore.reshape(groups, queries + 2 * width, *rest)
        query, key, value = cut(grouped, [queries, width, width], 1)
        if self.gated:
            query = query.reshape(groups, 2, -1, width, *rest).swapaxes(1, 2)
        return [part.reshape(-1, *rest) for part in (query, key, value)]


@dataclass(frozen=True)
class FuseGateUp:
    """gate, up <-> one above the other."""

    mcore: str
    hf: tuple[str, ...]

    def to_mcore(self, hf: Sequence[A], shape: Shape) -> A:
        return join(hf)

    def to_hf(self, mcore: A, shape: Shape) -> list[A]:
        half = mcore.shape[0] // 2
        return [mcore[:half], mcore[half:]]


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

    def to_mcore(self, hf: Sequence[A], shape: Shape) -> A:
        rows = hf[0].swapaxes(0, 1) if hf[0].ndim == 2 else hf[0]
        return join([rows[0::2], rows[1::2]])

    def to_hf(self, mcore: A, shape: Shape) -> list[A]:
        rest, half = mcore.shape[1:], mcore.shape[0] // 2
        rows = mcore.reshape(2, half, *rest).swapaxes(0, 1).reshape(-1, *rest)
        return [rows.swapaxes(0, 1) if rows.ndim == 2 else rows]


@dataclass(frozen=True)
class Ungroup:
    """Tensors whose rows are grouped by head <-> one whose rows are grouped by kind.

    Of `hf[i]`, each of `groups` groups has the kinds of rows whose lengths are `kinds[i]`. In the
    Megatron tensor all rows of the first kind come first, whatever their group, then those of the
    second: q, k, v, z of in_proj_qkvz, then b, a of in_proj_ba (qwen3_next).
    """

    mcore: str
    hf: tuple[str, ...]
    groups: int
    kinds: tuple[tuple[int, ...], ...]

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
