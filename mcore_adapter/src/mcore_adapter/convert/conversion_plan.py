"""Conversion plan: a model's table expanded for given parallel sizes.

The plan says which Hugging Face tensors make each Megatron tensor, and which ranks hold each
Megatron tensor. Nothing is read from disk.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from mcore_adapter.convert.table import ModelTable, Param, PipelineEnd
from mcore_adapter.errors import ConversionError, LayoutError
from mcore_adapter.parallel_sizes import ParallelSizes

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class HfRef:
    """Reference to a Hugging Face tensor, or to one expert's part of a stacked tensor."""

    name: str
    index: int | None = None
    """Number of the expert whose part is meant; None: the whole tensor."""


@dataclass(frozen=True, slots=True)
class Task:
    """Full Megatron tensor of the plan, which `param.op` makes from Hugging Face tensors."""

    name: str
    """Global Megatron name: layers and experts are numbered as in the model."""
    param: Param
    hf: tuple[HfRef, ...]
    """Hugging Face tensors, in the order that `param.op` takes them."""
    layer: int | None
    """Number of the layer; None: the tensor belongs to no layer."""
    expert: int | None
    """Number of the expert; None: the tensor belongs to no expert."""

    def stage(self, sizes: ParallelSizes, table: ModelTable) -> int:
        """Return the pipeline stage that holds the tensor."""
        if self.layer is not None:
            return sizes.stage_of_layer(self.layer, table.shape.num_layers)
        return 0 if self.param.place is PipelineEnd.FIRST else sizes.pp - 1

    def expert_rank(self, sizes: ParallelSizes, table: ModelTable) -> int | None:
        """Return the expert parallel rank that holds the tensor; None: all ranks hold it."""
        if self.expert is None:
            return None
        return sizes.expert_rank(self.expert, table.shape.num_experts)

    def shards(self, sizes: ParallelSizes) -> int:
        """Return the number of tensor parallel ranks that share the tensor."""
        return sizes.tp if self.expert is None else sizes.expert_tp


def tasks(table: ModelTable, sizes: ParallelSizes) -> list[Task]:
    """Return a task for each tensor of the whole model, optional ones included, in its order.

    Of `sizes` only `pp` counts: a copy (see `Param.copy_of`) gets a task only if `pp > 1`, because
    only then its original lies on another stage. `check_layout` checks whether the sizes fit.
    """
    found = []
    for param in table.params:
        if param.in_layer:
            continue
        if param.place is PipelineEnd.FIRST:
            found += list(_expand(param, table, None))
    for layer in range(table.shape.num_layers):
        for param in table.params:
            if param.in_layer and (param.layers is None or layer in param.layers):
                found += list(_expand(param, table, layer))
    for param in table.params:
        if param.in_layer or param.place is PipelineEnd.FIRST:
            continue
        if param.copy_of is None or sizes.pp > 1:
            found += list(_expand(param, table, None))
    return found


def whole_model_task(param: Param) -> Task:
    """Return the task of a row whose tensor belongs neither to a layer nor to an expert."""
    return Task(param.op.mcore, param, tuple(HfRef(name) for name in param.op.hf), None, None)


def check_layout(table: ModelTable, sizes: ParallelSizes) -> None:
    """Raise `LayoutError` unless layers, heads and experts divide over these sizes.

    There may be fewer key-value heads than tensor parallel ranks, if the number of ranks is a
    multiple of the number of heads: Megatron lets several ranks share a key-value head.
    """
    shape = table.shape
    sizes.chunks(shape.num_layers)
    counts = {"num_attention_heads": shape.num_heads, **table.divisible}
    for name, count in counts.items():
        if count % sizes.tp:
            raise LayoutError(f"{name} {count} does not divide over tp = {sizes.tp} ranks")
    groups = shape.num_kv_heads
    if groups % sizes.tp and sizes.tp % groups:
        raise LayoutError(f"num_key_value_heads {groups} and tp = {sizes.tp} do not divide")
    if shape.num_experts:
        sizes.experts_each(shape.num_experts)
    elif sizes.ep > 1 or sizes.etp is not None:
        raise LayoutError(f"ep and etp are for experts, and this {table.model_type} has none")


def present(planned: Iterable[Task], have: Iterable[str]) -> list[Task]:
    """Return all tasks if the checkpoint has a tensor of an optional task, else the required ones;
    never those of new tensors (see `Param.new`).

    Args:
        planned: tasks of the model, required and optional.
        have: names of the tensors of a checkpoint, in Hugging Face or in Megatron form.
    """
    planned, have = list(planned), set(have)
    keep = any(
        task.param.optional and (task.name in have or any(ref.name in have for ref in task.hf))
        for task in planned
    )
    return [t for t in planned if not t.param.new and (keep or not t.param.optional)]


def check_coverage(planned: Iterable[Task], have: Iterable[str], table: ModelTable) -> None:
    """Check that `have`, names in a Hugging Face checkpoint, are exactly those that the plan uses.

    Optional tensors may be absent, all together. Tensors that the table drops or lists in `repeats`
    may be there in addition.

    Raises:
        ConversionError: tensors are missing or unmapped, or the table uses a tensor twice. The
            message lists them.
    """
    have = set(have)
    planned = present(planned, have)
    copies = {task.name for task in planned if task.param.copy_of is not None}
    wanted = Counter(ref for task in planned if task.name not in copies for ref in task.hf)
    twice = sorted({ref.name for ref, count in wanted.items() if count > 1})
    if twice:
        raise ConversionError(f"the table of {table.model_type} uses twice: {_some(twice)}")
    names = {ref.name for ref in wanted}
    missing = sorted(names - have)
    unmapped = sorted(
        name for name in have - names if name not in table.repeats and not is_dropped(name, table)
    )
    if not missing and not unmapped:
        return
    lines = [f"this checkpoint does not fit the table of {table.model_type}"]
    if missing:
        lines.append(f"{len(missing)} missing: {_some(missing)}")
        near = get_close_matches(missing[0], unmapped, n=1)
        if near:
            lines.append(f"{missing[0]} may be {near[0]}")
    if unmapped:
        lines.append(f"{len(unmapped)} unmapped: {_some(unmapped)}")
    raise ConversionError("; ".join(lines))


def is_dropped(name: str, table: ModelTable) -> bool:
    """Return True if the table lists the Hugging Face tensor as one without information."""
    return any(re.fullmatch(_regex(pattern), name) for pattern in table.dropped)


def _expand(param: Param, table: ModelTable, layer: int | None) -> Iterator[Task]:
    """Yield the tasks of a table row for one layer: one per expert, or one if it has no experts."""
    experts: Iterable[int | None] = range(table.shape.num_experts) if param.of_expert else (None,)
    for expert in experts:
        stacked = expert if param.stacked else None
        yield Task(
            name=_fill(param.op.mcore, layer, expert),
            param=param,
            hf=tuple(HfRef(_fill(name, layer, expert), stacked) for name in param.op.hf),
            layer=layer,
            expert=expert,
        )


def _fill(pattern: str, layer: int | None, expert: int | None) -> str:
    """Return a name pattern with `*` and `@` replaced by the numbers of layer and expert."""
    return pattern.replace("*", str(layer)).replace("@", str(expert))


def _regex(pattern: str) -> str:
    """Return a name pattern as a regular expression in which `*` and `@` match any number."""
    return re.escape(pattern).replace(r"\*", r"\d+").replace("@", r"\d+")


def _some(names: list[str]) -> str:
    """Return the first names as text, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
