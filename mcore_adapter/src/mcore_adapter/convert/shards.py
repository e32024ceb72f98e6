"""Shard rules: conversion between a full Megatron tensor and its tensor parallel shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mcore_adapter.convert.arrays import A, cut, join
from mcore_adapter.errors import LayoutError


class ShardRule(Protocol):
    """Interface of a shard rule. `merge` is the exact inverse of `split`."""

    def split(self, full: A, ranks: int) -> list[A]:
        """Return the shard of each of `ranks` tensor parallel ranks, in the order of the ranks.

        That the tensor divides over the ranks is not checked, see `shard_shape`.
        """
        ...

    def merge(self, shards: Sequence[A]) -> A:
        """Return the full tensor made of the shards of all ranks, in the order of the ranks."""
        ...

    def shard_shape(self, full: Sequence[int], ranks: int, name: str) -> tuple[int, ...]:
        """Return the shape of one shard of a tensor of shape `full`, cut over `ranks` ranks.

        Raises:
            LayoutError: the tensor does not divide over the ranks; the message begins with `name`.
        """
        ...


@dataclass(frozen=True)
class Replicated:
    """Rule for a tensor that is the same on every rank."""

    def split(self, full: A, ranks: int) -> list[A]:
        return [full] * ranks

    def merge(self, shards: Sequence[A]) -> A:
        return shards[0]

    def shard_shape(self, full: Sequence[int], ranks: int, name: str) -> tuple[int, ...]:
        return tuple(full)


@dataclass(frozen=True)
class Sharded:
    """Rule for a tensor that is cut evenly along `dim`.

    The tensor may consist of several blocks along `dim` (gate, up). Each block is cut evenly, so
    that every rank has the same part of each block.
    """

    dim: int = 0
    blocks: int | tuple[int, ...] = 1
    """Number of blocks of equal length, or the length of each block in the full tensor."""

    def split(self, full: A, ranks: int) -> list[A]:
        blocks = cut(full, self._lengths(full.shape[self.dim]), self.dim)
        parts = [cut(block, [block.shape[self.dim] // ranks] * ranks, self.dim) for block in blocks]
        return [join([part[rank] for part in parts], self.dim) for rank in range(ranks)]

    def merge(self, shards: Sequence[A]) -> A:
        lengths = self._lengths(shards[0].shape[self.dim] * len(shards))
        each = [length // len(shards) for length in lengths]
        parts = [cut(shard, each, self.dim) for shard in shards]
        return join([part[block] for block in range(len(each)) for part in parts], self.dim)

    def shard_shape(self, full: Sequence[int], ranks: int, name: str) -> tuple[int, ...]:
        """Return the shape of one shard.

        Raises:
            LayoutError: the dimension or a block of it does not divide over the ranks.
        """
        size = full[self.dim]
        blocks = self.blocks if isinstance(self.blocks, int) else 1
        lengths = self._lengths(size)
        if size % blocks or any(length % ranks for length in lengths):
            raise LayoutError(
                f"{name}: {size} of shape {list(full)}, {len(lengths)} blocks, does not divide "
                f"over {ranks} tensor parallel ranks"
            )
        return (*full[: self.dim], size // ranks, *full[self.dim + 1 :])

    def _lengths(self, size: int) -> list[int]:
        """Return the length of each block along `dim`, in a tensor of length `size` there."""
        if isinstance(self.blocks, int):
            return [size // self.blocks] * self.blocks
        return list(self.blocks)
