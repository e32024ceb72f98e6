"""Comparison of the shapes that follow from `config.json` with those in the headers of files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mcore_adapter.convert.arrays import Outline
from mcore_adapter.convert.conversion_plan import Task, tasks
from mcore_adapter.convert.table import ModelTable
from mcore_adapter.errors import ConversionError
from mcore_adapter.parallel_sizes import ParallelSizes

_SHOWN = 3


class FullShapes:
    """Shapes of full Megatron tensors without padding.

    Calling the object with a task returns the shape of its tensor. Each row of the table is
    computed once for all layers and experts.
    """

    def __init__(self, table: ModelTable) -> None:
        self._table = table
        self._known: dict[int, tuple[int, ...]] = {}

    def __call__(self, task: Task) -> tuple[int, ...]:
        """Return the shape of the full Megatron tensor of a task, without padding."""
        found = self._known.get(id(task.param))
        if found is None:
            outlines = [Outline(tuple(map(int, shape))) for shape in task.param.shapes]
            found = task.param.op.to_mcore(outlines, self._table.shape).shape
            self._known[id(task.param)] = found
        return found


def check_widths(table: ModelTable, sizes: ParallelSizes) -> None:
    """Raise `LayoutError` unless each matrix divides over the ranks that share it: Megatron-Core
    asserts it without a name. `check_layout` comes first."""
    full = FullShapes(table)
    for task in {id(task.param): task for task in tasks(table, sizes)}.values():
        if not task.param.pads_vocab:  # the vocabulary is padded to divide
            task.param.shard.shard_shape(full(task), task.shards(sizes), task.name)


def hf_shapes(task: Task, table: ModelTable) -> list[tuple[int, ...]]:
    """Return the shapes of the Hugging Face tensors that a task takes, in the task's order.

    If the task takes one expert's part of a tensor, the shape is that of the whole tensor.
    """
    each = zip(task.hf, task.param.shapes, strict=True)
    return [
        shape if ref.index is None else (table.shape.num_experts, *shape) for ref, shape in each
    ]


def check_shapes(
    planned: Iterable[Task], have: Mapping[str, Sequence[int]], table: ModelTable
) -> None:
    """Check that the tensors of a checkpoint have the shapes that follow from `config.json`.

    Args:
        have: shapes of the tensors of a checkpoint, by Hugging Face name; must have all tensors
            that `planned` uses (see `check_coverage`).

    Raises:
        ConversionError: a tensor has another shape. The message names such tensors, and the keys of
            `config.json` that their shapes follow from.
    """
    wrong: dict[str, str] = {}
    count = 0
    for task in planned:
        for ref, shape in zip(task.hf, hf_shapes(task, table), strict=True):
            if ref.name in wrong or tuple(have[ref.name]) == shape:
                continue
            count += 1
            if len(wrong) < _SHOWN:
                wrong[ref.name] = f"{ref.name} {list(have[ref.name])}, expected {_told(shape)}"
    if wrong:
        more = f"; and {count - len(wrong)} more" if count > len(wrong) else ""
        raise ConversionError(f"shapes do not fit config.json: {'; '.join(wrong.values())}{more}")


def _told(shape: tuple[int, ...]) -> str:
    """Return a shape as text, with the keys of `config.json` that give it where they are known."""
    numbers = list(map(int, shape))
    keys = [str(getattr(size, "label", size)) for size in shape]
    plain = keys == [str(number) for number in numbers]
    return f"{numbers}" if plain else f"{numbers} = [{', '.join(keys)}]"
