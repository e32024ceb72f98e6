"""Division of a batch into micro-batches, whose number is the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from mcore_adapter.parallel.packing import pack
from mcore_adapter.train.data.micro_batches import round_up
from roll.core.batches import TokenBatch
from roll.core.errors import ConfigError
from roll.core.pictures import patches_of_rows
from roll.strategy.megatron.batches import shapes
from roll.strategy.megatron.batches.micro import Micro
from roll.strategy.megatron.batches.shapes import NO_UNIT, Part, UnitSize
from roll.strategy.megatron.model import MegatronModel
from roll.strategy.training import microbatch
from roll.strategy.training.reduce import max_over_ranks

B = TypeVar("B", bound=TokenBatch)

_EMPTY = (1, 2)
"""Rows, and tokens per row, of a micro-batch without data."""


def micro_batches(
    batch: B, max_tokens: int, model: MegatronModel, device: torch.device
) -> list[Micro[B]]:
    """Divide a batch into micro-batches, the same number on every rank. Collective.

    With expert parallelism, or experts cut over more ranks than the rest (`etp` above `tp`), ranks
    send tokens to the experts of other ranks, so all ranks use the same shape for each micro-batch.
    With virtual stages all micro-batches have one shape: Megatron-Core sends shapes to the previous
    and the next stage at the same time; with two stages both are the same rank, and Megatron-Core
    mixes the shapes up.

    Raises:
        ConfigError: rows have pictures, and the model reads none.
    """
    seen = patches_of_rows(batch.pictures, len(batch))
    if any(seen) and model.sight is None:
        raise ConfigError(
            "rows have pictures, and the model of this role reads none; name one that does, or "
            "data without pictures"
        )
    planned = _packed_parts if model.packs else _padded_parts
    parts = planned(batch, seen, max_tokens, model, device)
    return [_micro(batch, part, model, device) for part in parts]


def _padded_parts(
    batch: TokenBatch,
    seen: Sequence[int],
    max_tokens: int,
    model: MegatronModel,
    device: torch.device,
) -> list[Part]:
    """Return the parts of a batch whose rows are padded. Collective.

    Ranks that agree divide their rows as if the longest of each were as long as the longest of any
    rank, the second longest as long as the second longest of any, and so on.

    Args:
        seen: number of patches of each row.
    """
    sizes, equal = model.sizes, model.sizes.vpp > 1
    starts, units = shapes.sizes_of_units(batch.lengths.tolist(), seen, batch.unit)
    if _agree(model):
        units = _largest_of_ranks(units, device)
    parts = shapes.plan(starts, units, max_tokens, unit=batch.unit, equal=equal)
    passes = max_over_ranks(len(parts), device)
    if equal:
        passes += -passes % sizes.pp  # the schedule needs a multiple of pp
    empty = parts[0] if equal and parts else Part([], *_EMPTY)
    return parts + [replace(empty, rows=[])] * (passes - len(parts))


def _packed_parts(
    batch: TokenBatch,
    seen: Sequence[int],
    max_tokens: int,
    model: MegatronModel,
    device: torch.device,
) -> list[Part]:
    """Return the parts of a batch whose rows are packed. Collective.

    Each rank divides its own rows; ranks that agree then make their longest packed rows as long as
    the longest of any rank, their second longest as long as the second longest of any, and so on.

    Args:
        seen: number of patches of each row.
    """
    piece = _piece_divisor(model)
    parts = shapes.plan_packed(
        [round_up(length, piece) for length in batch.lengths.tolist()],
        seen,
        max_tokens,
        unit=batch.unit,
        turns=model.sizes.pp if model.sizes.vpp > 1 else None,
    )
    passes = max_over_ranks(len(parts), device)
    equal = model.sizes.vpp > 1 and bool(parts)
    empty = Part([], *((1, parts[0].width) if equal else _EMPTY))
    parts += [empty] * (passes - len(parts))
    if not _agree(model):
        return parts
    widths = torch.tensor([each.width for each in parts], device=device, dtype=torch.long)
    dist.all_reduce(widths, op=dist.ReduceOp.MAX)
    if model.sizes.vpp > 1:
        widths[:] = widths.max()  # of a rank without rows
    return [replace(part, width=width) for part, width in zip(parts, widths.tolist(), strict=True)]


def _agree(model: MegatronModel) -> bool:
    """Return whether all ranks use the same shape for each micro-batch."""
    return model.sizes.ep > 1 or model.sizes.expert_tp > model.sizes.tp


def _micro(batch: B, part: Part, model: MegatronModel, device: torch.device) -> Micro[B]:
    """Return the micro-batch of a part; a part without rows is padding alone."""
    width = part.width + -part.width % _divisor(model)
    taken = microbatch.take(batch, part.rows) if part.rows else None
    if model.packs:
        rows = [torch.zeros(width, dtype=torch.long)]
        if taken is not None:
            lengths = taken.lengths.tolist()
            rows = [row[:length] for row, length in zip(taken.tokens, lengths, strict=True)]
        packed = pack(rows, each_multiple=_piece_divisor(model), length=width)
        tokens_BT, positions_BT = packed.tokens_BT.to(device), packed.positions_BT.to(device)
        return Micro(part.rows, taken, tokens_BT, positions_BT, packed)
    tokens_BT = torch.zeros(part.num_rows, width, dtype=torch.long)
    if taken is not None:
        own_rows, own_width = taken.tokens.shape
        tokens_BT[:own_rows, :own_width] = taken.tokens
    tokens_BT = tokens_BT.to(device)
    positions_BT = torch.arange(width, device=device).expand_as(tokens_BT)
    return Micro(part.rows, taken, tokens_BT, positions_BT)


def _largest_of_ranks(units: Sequence[UnitSize], device: torch.device) -> list[UnitSize]:
    """Return, for each place in the order of units, the largest size of any rank. Collective."""
    absent = max_over_ranks(len(units), device) - len(units)
    own = [(each.longest, each.patches) for each in (*units, *[NO_UNIT] * absent)]
    agreed = torch.tensor(own, device=device, dtype=torch.long).reshape(-1, 2)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return [UnitSize(longest, patches) for longest, patches in agreed.tolist()]


def _divisor(model: MegatronModel) -> int:
    """Return what divides the tokens of a row, for sequence and context parallelism.

    Then ranks have equal parts of each row: tensor parallel ranks one, context parallel ranks two.
    """
    return (model.sizes.tp if model.sequence_parallel else 1) * _piece_divisor(model)


def _piece_divisor(model: MegatronModel) -> int:
    """Return what divides the tokens of each sequence of a row, for context parallelism."""
    return 2 * model.cp if model.cp > 1 else 1
