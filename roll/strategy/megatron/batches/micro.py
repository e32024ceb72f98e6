"""A micro-batch: padded rows, or rows packed behind one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from mcore_adapter.parallel.packing import Packed
from roll.core.batches import TokenBatch
from roll.core.pictures import Pictures

B = TypeVar("B", bound=TokenBatch)


@dataclass(frozen=True)
class Micro(Generic[B]):
    """Micro-batch of a single pass through the pipeline."""

    rows: Sequence[int]
    """Indices of the rows in the rank's batch."""
    batch: B | None
    """The rows; None if this rank has no rows for the pass and only takes part in collectives."""
    tokens_BT: Tensor
    """Token ids that the model reads, int64 `[B, T]`: the rows, with extra rows and columns of
    padding if ranks must agree on a shape; or one row, if the rows are packed."""
    positions_BT: Tensor
    """Positions of these tokens in their rows, of text, int64."""
    packed: Packed | None = None
    """The packed rows, on the CPU; None: they are padded."""

    @cached_property
    def padding_BT(self) -> Tensor:
        """True at padding, bool `[B, T]`."""
        if self.batch is not None and self.packed is not None:
            return self.packed.padding_BT.to(self.tokens_BT.device)
        lengths = torch.zeros(len(self.tokens_BT), 1, dtype=torch.long)
        if self.batch is not None:
            lengths[: len(self.rows), 0] = self.batch.lengths
        found_BT = torch.arange(self.tokens_BT.shape[1]) >= lengths
        return found_BT.to(self.tokens_BT.device)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of tokens of the sequences of each row that the model reads, padding included."""
        return (self.tokens_BT.shape[1],) if self.packed is None else self.packed.spans

    @property
    def pictures(self) -> list[Pictures | None]:
        """Pictures of each row; empty if no row has any."""
        found = None if self.batch is None else self.batch.pictures
        return found if found is not None and any(found) else []

    @property
    def arguments(self) -> dict[str, Any]:
        """Further arguments of the model."""
        return {} if self.packed is None else {"packed_seq_params": self.packed.params}

    def places(self, flat_N: Tensor) -> Tensor:
        """Return the places of tokens of packed rows in the row that the model reads, int64 `[N]`.

        Args:
            flat_N: flat indices of the tokens in `batch.tokens`.
        """
        assert self.batch is not None
        width = self.batch.tokens.shape[1]
        spans_S = torch.tensor(self.lengths, device=flat_N.device)
        starts_S = spans_S.cumsum(0) - spans_S
        return starts_S[flat_N // width] + flat_N % width
