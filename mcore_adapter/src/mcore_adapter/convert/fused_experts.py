"""Tables for checkpoints with fused experts.

Such a checkpoint has two tensors per layer for all experts: one with all gate and up projections,
and one with all down projections. transformers 5 holds experts so in memory, and writes them so
with `save_pretrained(..., save_original_format=False)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mcore_adapter.convert.ops import FuseGateUp, Rename
from mcore_adapter.convert.table import ModelTable, Param

_MIXTRAL, _MLP = ".block_sparse_moe.", ".mlp."


def table_as_stored(table: ModelTable, names: Iterable[str]) -> ModelTable:
    """Return the table that fits a checkpoint: `fused(table)` or `table` itself.

    Args:
        table: table of the model in the original format.
        names: names of the tensors of the checkpoint.
    """
    other = fused(table)
    marks = {
        row.op.hf[0].partition("*")[2]
        for row, was in zip(other.params, table.params, strict=True)
        if row.stacked and not was.stacked
    }
    return other if any(name.endswith(tuple(marks)) for name in names) and marks else table


def fused(table: ModelTable) -> ModelTable:
    """Return the table of the same model for a checkpoint with fused experts."""
    return replace(table, params=tuple(map(_fused, table.params)), fused=True)


def _fused(row: Param) -> Param:
    """Return the row for a checkpoint that stacks all experts; keep optional and stacked rows."""
    if row.optional or row.stacked:
        # Optional layers that predict further tokens exist only in the original format.
        return row
    names = tuple(name.replace(_MIXTRAL, _MLP) for name in row.op.hf)
    if not row.of_expert:
        if isinstance(row.op, Rename) and names != row.op.hf:
            return replace(row, op=Rename(row.op.mcore, names[0]))
        return row
    experts, _, _ = names[0].partition("@.")
    if isinstance(row.op, FuseGateUp):
        (width, hidden), _ = row.shapes
        op, shape = Rename(row.op.mcore, experts + "gate_up_proj"), (2 * width, hidden)
        return replace(row, op=op, shapes=(shape,), stacked=True)
    return replace(row, op=Rename(row.op.mcore, experts + "down_proj"), stacked=True)
