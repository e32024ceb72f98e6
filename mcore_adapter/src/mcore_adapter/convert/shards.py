"""Shard rules: one full Megatron tensor <-> its tensor parallel shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mcore_adapter.errors import LayoutError


class ShardRule(Protocol):
    def split(self, full: Tensor, ranks: int) -> list[Tensor]: ...

    def merge(self, shards: Sequence[Tensor]) -> Tensor: ...

    def shard_shape(self, full: Sequence[int], ranks: int, name: str) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Replicated:
    """The same on every rank."""

    def split(self, full: Tensor, ranks: int) -> list[Tensor]:
        return [full] * ranks

    def merge(self, shards: Sequence[Tensor]) -> Tensor:
        return shards[0]

    def shard_shape(self, full: Sequence[int], ranks: int, name: str) -> tuple[int, ...]:
        return tuple(full)


@dataclass(frozen=True)
class Sharded:
    """Cut along `dim`; `blocks` that lie one after the other (gate, up) are cut alike, so that
    every rank has the same part of each."""

    dim: int = 0
    blocks: int = 1

    def split(self, full: Tensor, ranks: int) -> list[Tensor]:
        parts = [block.chunk(ranks, self.dim) for block in full.chunk(self.blocks, self.dim)]
        if len(parts) == 1:
            return list(parts[0])
        return [torch.cat([part[rank] for part in parts], self.dim) for rank in range(ranks)]

    def merge(self, shards: Sequence[Tensor]) -> Tensor:
        parts = [shard.chunk(self.blocks, self.dim) for shard in shards]
        ordered = [part[block] for block in range(self.blocks) for part in parts]
        return ordered[0] if len(ordered) == 1 else torch.cat(ordered, self.dim)

    def shard_shape(self, full: Sequence[int], ranks: int, name: str) -> tuple[int, ...]:
        """
        Raises:
            LayoutError: the dimension does not divide.
        """
        size = full[self.dim]
        if size % (self.blocks * ranks):
            raise LayoutError(
                f"{name}: {size} of shape {list(full)} does not divide into {self.blocks} x {ranks}"
            )
        return (*full[: self.dim], size // ranks, *full[self.dim + 1 :])
