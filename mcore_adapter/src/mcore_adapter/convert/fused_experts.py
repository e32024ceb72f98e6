"""Tables for checkpoints whose tensors are named and stored as transformers 5 holds them.

`save_pretrained(..., save_original_format=False)` writes such a checkpoint. Its experts are fused:
it has two tensors per layer for all experts, one with all gate and up projections, and one with all
down projections. Models that see may differ in names or formats, too (`ModelTable.held`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mcore_adapter.convert.conversion_plan import tasks
from mcore_adapter.convert.ops import FuseGateUp, Rename
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.parallel_sizes import ParallelSizes

_MIXTRAL, _MLP = ".block_sparse_moe.", ".mlp."


def table_as_stored(table: ModelTable, shapes: Mapping[str, Sequence[int]]) -> ModelTable:
    """Return the table that fits a checkpoint: `fused(table)` or `table` itself.

    Args:
        table: table of the model in the original format.
        shapes: shapes of the tensors of the checkpoint, by name.
    """
    other = fused(table)
    if table.held is not None:
        return other if _holds(table, other, shapes) else table
    marks = {
        row.op.hf[0].partition("*")[2]
        for row, was in zip(other.params, table.params, strict=True)
        if row.stacked and not was.stacked
    }
    return other if any(name.endswith(tuple(marks)) for name in shapes) and marks else table


def fused(table: ModelTable) -> ModelTable:
    """Return the table of the same model for a checkpoint as transformers 5 holds it."""
    if table.held is not None:
        return replace(table.held, fused=True)
    return replace(table, params=tuple(map(_fused, table.params)), fused=True)


def table_as_adapted(table: ModelTable, modules: Iterable[str]) -> ModelTable:
    """Return the table whose names an adapter uses: `table.held` or `table` itself.

    PEFT names factors after modules, and transformers before 5 named these as in files.

    Args:
        modules: Hugging Face names of the linear layers that have factors.
    """
    if table.held is None:
        return table
    held = {ref.name for task in tasks(table.held, ParallelSizes()) for ref in task.hf}
    return table.held if any(f"{module}.weight" in held for module in modules) else table


def names_in_files(table: ModelTable) -> dict[str, str]:
    """Map the names that tensors have in transformers 5 to those in the table, where they
    differ."""
    if table.held is None:
        return {}
    pairs = zip(*(tasks(each, ParallelSizes()) for each in (table.held, table)), strict=True)
    return {
        theirs.name: ours.name
        for held, task in pairs
        for theirs, ours in zip(held.hf, task.hf, strict=True)
        if theirs.name != ours.name
    }


def _holds(table: ModelTable, held: ModelTable, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Return True if a checkpoint fits `held` and not `table`, by the first row that tells."""
    for was, row in zip(table.params, held.params, strict=True):
        (name, expected), (other_name, other) = _first(row, held), _first(was, table)
        if name in shapes and name != other_name:
            return True
        if name in shapes and expected != other and tuple(shapes[name]) in (expected, other):
            return tuple(shapes[name]) == expected
    return False


def _first(row: Param, table: ModelTable) -> tuple[str, tuple[int, ...]]:
    """Return name and shape of the first Hugging Face tensor of a row, in its first layer."""
    layers = range(table.shape.num_layers) if row.layers is None else row.layers
    name = row.op.hf[0].replace("*", str(next(iter(layers), 0)))
    stack = (table.shape.num_experts,) if row.stacked else ()
    return name, tuple(map(int, (*stack, *row.shapes[0])))


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
