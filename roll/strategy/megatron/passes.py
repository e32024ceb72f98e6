"""Passes of a batch through the pipeline.

Micro-batches have a token budget. Their number is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_adapter.local_tensors import unwrapped
from mcore_adapter.modeling.experts import balances, padding_here
from mcore_adapter.parallel.context import cut
from mcore_adapter.parallel.schedule import run_schedule
from roll.core.batches import TokenBatch
from roll.core.errors import ConfigError
from roll.core.pictures import Pictures, patches_of_rows
from roll.strategy.megatron import groups, shapes
from roll.strategy.megatron.model import MegatronModel
from roll.strategy.megatron.pictures import Sight
from roll.strategy.megatron.shapes import NO_UNIT, Part, UnitSize
from roll.strategy.training import microbatch
from roll.strategy.training.reduce import max_over_ranks

B = TypeVar("B", bound=TokenBatch)
R = TypeVar("R")

_EMPTY = (1, 2)
"""Rows, and tokens per row, of a micro-batch without data."""


@dataclass(frozen=True)
class Micro(Generic[B]):
    """Micro-batch of a single pass through the pipeline."""

    rows: Sequence[int]
    """Indices of the rows in the rank's batch."""
    batch: B | None
    """The rows; None if this rank has no rows for the pass and only takes part in collectives."""
    tokens_BT: Tensor
    """Token ids of the rows, int64 `[B, T]`. Extra rows and columns of padding are added if ranks
    must agree on a shape."""

    @property
    def padding_BT(self) -> Tensor:
        """True at padding, bool `[B, T]`."""
        lengths = torch.zeros(len(self.tokens_BT), 1, dtype=torch.long)
        if self.batch is not None:
            lengths[: len(self.rows), 0] = self.batch.lengths
        found_BT = torch.arange(self.tokens_BT.shape[1]) >= lengths
        return found_BT.to(self.tokens_BT.device)

    @property
    def pictures(self) -> list[Pictures | None]:
        """Pictures of each row; empty if no row has any."""
        found = None if self.batch is None else self.batch.pictures
        return found if found is not None and any(found) else []


def micro_batches(
    batch: B, max_tokens: int, model: MegatronModel, device: torch.device
) -> list[Micro[B]]:
    """Divide a batch into micro-batches, the same number on every rank. Collective.

    With expert parallelism, or experts cut over more ranks than the rest (`etp` above `tp`), ranks
    send tokens to the experts of other ranks, so all ranks use the same shape for each micro-batch:
    each divides its rows as if its longest were as long as the longest of any rank, its second
    longest as long as the second longest of any, and so on. With virtual stages all micro-batches
    have one shape: Megatron-Core sends shapes to the previous and the next stage at the same time;
    with two stages both are the same rank, and Megatron-Core mixes the shapes up.

    Raises:
        ConfigError: rows have pictures, and the model reads none.
    """
    sizes, seen = model.sizes, patches_of_rows(batch.pictures, len(batch))
    if any(seen) and model.sight is None:
        raise ConfigError(
            "rows have pictures, and the model of this role reads none; name one that does, or "
            "data without pictures"
        )
    starts, units = shapes.sizes_of_units(batch.lengths.tolist(), seen, batch.unit)
    if sizes.ep > 1 or sizes.expert_tp > sizes.tp:
        units = _largest_of_ranks(units, device)
    equal = sizes.vpp > 1
    parts = shapes.plan(starts, units, max_tokens, unit=batch.unit, equal=equal)
    passes = max_over_ranks(len(parts), device)
    if equal:
        passes += -passes % sizes.pp  # the schedule needs a multiple of pp
    empty = parts[0] if equal and parts else Part([], *_EMPTY)
    parts += [replace(empty, rows=[])] * (passes - len(parts))
    return [_micro(batch, part, model, device) for part in parts]


def _micro(batch: B, part: Part, model: MegatronModel, device: torch.device) -> Micro[B]:
    """Return the micro-batch of a part; a part without rows is padding alone."""
    width = part.width + -part.width % _divisor(model)
    tokens_BT = torch.zeros(part.num_rows, width, dtype=torch.long)
    taken = microbatch.take(batch, part.rows) if part.rows else None
    if taken is not None:
        own_rows, own_width = taken.tokens.shape
        tokens_BT[:own_rows, :own_width] = taken.tokens
    return Micro(part.rows, taken, tokens_BT.to(device))


def _largest_of_ranks(units: Sequence[UnitSize], device: torch.device) -> list[UnitSize]:
    """Return, for each place in the order of units, the largest size of any rank. Collective."""
    absent = max_over_ranks(len(units), device) - len(units)
    own = [(each.longest, each.patches) for each in (*units, *[NO_UNIT] * absent)]
    agreed = torch.tensor(own, device=device, dtype=torch.long).reshape(-1, 2)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return [UnitSize(longest, patches) for longest, patches in agreed.tolist()]


def run(
    model: MegatronModel,
    micros: Sequence[Micro[B]],
    reduce: Callable[[Tensor, B], tuple[Tensor, R]],
    *,
    forward_only: bool,
) -> list[tuple[Micro[B], R]]:
    """Run the forward pass and, unless `forward_only`, the backward pass of all micro-batches.

    Collective.

    Args:
        micros: result of `micro_batches`; at least one.
        reduce: computes the loss and a result to keep, from the last stage's output `[B, T, S]` of
            a micro-batch: logits of the part of the vocabulary on this tensor parallel rank, or
            one number. Ranks that share rows have the outputs of their own tokens, padding
            included. The losses of all micro-batches are added.

    Returns:
        Each micro-batch that has rows, with its result. Empty on all stages but the last.
    """

    def loss(output_BTS: Tensor, micro: Micro[B]) -> tuple[Tensor, tuple[Micro[B], R] | None]:
        if micro.batch is None:
            return output_BTS[:0].float().sum(), None
        rows, width = micro.batch.tokens.shape
        mine_BTS = output_BTS[:rows] if model.cp > 1 else output_BTS[:rows, :width]
        value, result = reduce(mine_BTS, micro.batch)
        return value, (micro, result)

    rows, width = micros[0].tokens_BT.shape
    kept = run_schedule(
        model.chunks,
        micros,
        partial(_forward, model.sight, groups.context_parallel()),
        loss,
        micro_batch_size=rows,  # used only if all micro-batches have one shape
        longest=width,
        forward_only=forward_only,
    )
    return [each for each in kept if each is not None]


def _forward(
    sight: Sight | None, sharers: dist.ProcessGroup, chunk: nn.Module, micro: Micro[B]
) -> Tensor:
    """Run one stage on a micro-batch; the last stage returns its output `[B, T, S]`, of ranks that
    share rows (`sharers`) that of their own tokens.

    Patches are fetched here, so that only the first stage holds any, and those of micro-batches in
    flight.
    """
    tokens_BT, pictures = micro.tokens_BT, micro.pictures
    further: dict[str, Any] = {}
    if pictures and sight is not None:
        positions = sight.positions(tokens_BT, pictures)
        if unwrapped(chunk).pre_process:
            further["pictures"] = sight.seen(tokens_BT, pictures)
    else:
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
    if sharers.size() > 1:
        tokens_BT, positions = cut(tokens_BT, sharers), cut(positions, sharers)
    if balances(bare := unwrapped(chunk)):
        padding_BT = micro.padding_BT
        here_BT = cut(padding_BT, sharers) if sharers.size() > 1 else padding_BT
        further["padding_mask"] = padding_here(bare, here_BT)
    output: Tensor = chunk(tokens_BT, positions, None, **further)
    return output


def _divisor(model: MegatronModel) -> int:
    """Return what divides the tokens of a row, for sequence and context parallelism.

    Then ranks have equal parts of each row: tensor parallel ranks one, context parallel ranks two.
    """
    return (model.sizes.tp if model.sequence_parallel else 1) * (
        2 * model.cp if model.cp > 1 else 1
    )
