"""A table for given sizes: which tensors make which, and who holds them. Nothing is read."""

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
    """A Hugging Face tensor, or one expert's part of it."""

    name: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """One full Megatron tensor: `param.op` makes it of the tensors `hf`, in their order."""

    name: str
    """Global: layers and experts are numbered as in the model."""
    param: Param
    hf: tuple[HfRef, ...]
    layer: int | None
    expert: int | None

    def stages(self, sizes: ParallelSizes, table: ModelTable) -> tuple[int, ...]:
        """Pipeline stages that hold it."""
        if self.layer is not None:
            return (sizes.stage_of_layer(self.layer, table.shape.num_layers),)
        return (0,) if self.param.place is PipelineEnd.FIRST else (sizes.pp - 1,)

    def expert_rank(self, sizes: ParallelSizes, table: ModelTable) -> int | None:
        """The expert parallel rank that holds it; None: all do."""
        if self.expert is None:
            return None
        return sizes.expert_rank(self.expert, table.shape.num_experts)

    def shards(self, sizes: ParallelSizes) -> int:
        """Tensor parallel ranks that share it."""
        return sizes.tp if self.expert is None else sizes.expert_tp


def tasks(table: ModelTable, sizes: ParallelSizes) -> list[Task]:
    """All tensors of the model under these sizes, in the order of the model.

    A copy (see `Param.copy_of`) is only made where its original lies on another stage.
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
    """Of a row that is neither of layers nor of experts."""
    return Task(param.op.mcore, param, tuple(HfRef(name) for name in param.op.hf), None, None)


def check_layout(table: ModelTable, sizes: ParallelSizes) -> None:
    """Raises `LayoutError` unless layers, heads and experts divide over these sizes.

    Fewer key-value heads than ranks are no obstacle: Megatron lets ranks share one.
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
    """The tasks without the optional ones, unless the checkpoint has any of their tensors.

    Args:
        have: names of a checkpoint, of Hugging Face or of Megatron.
    """
    planned, have = list(planned), set(have)
    keep = any(
        task.param.optional and (task.name in have or any(ref.name in have for ref in task.hf))
        for task in planned
    )
    return [task for task in planned if keep or not task.param.optional]


def check_coverage(planned: Iterable[Task], have: Iterable[str], table: ModelTable) -> None:
    """Every tensor of a Hugging Face checkpoint is used once, and all that are needed are there.

    Raises:
        ConversionError: lists what is missing and what is unmapped.
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
    """Whether a Hugging Face tensor is known to carry nothing."""
    return any(re.fullmatch(_regex(pattern), name) for pattern in table.dropped)


def _expand(param: Param, table: ModelTable, layer: int | None) -> Iterator[Task]:
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
    return pattern.replace("*", str(layer)).replace("@", str(expert))


def _regex(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", r"\d+").replace("@", r"\d+")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
