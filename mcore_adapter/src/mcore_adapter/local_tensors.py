"""Lookup of the tensors of a model's table that this rank's chunks hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from mcore_adapter.convert.conversion_plan import Task, tasks, whole_model_task
from mcore_adapter.convert.table import ModelTable
from mcore_adapter.errors import ConversionError
from mcore_adapter.models.common import EMBEDDING, MTP_EMBEDDING, mtp_embedding
from mcore_adapter.parallel_sizes import ParallelSizes

_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Ranks of this process in its parallel groups."""

    tp: int
    pp: int
    ep: int
    etp: int

    @classmethod
    def of_this_process(cls) -> Ranks:
        """Return the ranks in the groups that `init_parallel` made."""
        from megatron.core import parallel_state

        return cls(
            tp=parallel_state.get_tensor_model_parallel_rank(),
            pp=parallel_state.get_pipeline_model_parallel_rank(),
            ep=parallel_state.get_expert_model_parallel_rank(),
            etp=parallel_state.get_expert_tensor_parallel_rank(),
        )

    def shard_of(self, task: Task) -> int:
        """Return the index of this rank's shard of a tensor."""
        return self.tp if task.expert is None else self.etp


@dataclass(frozen=True)
class Held:
    """A tensor of the table, together with this rank's shard of it in the model."""

    task: Task
    tensor: Tensor


def held_tensors(
    chunks: Sequence[nn.Module], table: ModelTable, sizes: ParallelSizes, ranks: Ranks
) -> list[Held]:
    """Return the tensors of the table that this rank holds, in the order of the table's tasks.

    With the table of an adapter these are the LoRA factors, and a head that is trained beside them;
    with any other table, all parameters and persistent buffers but the factors.

    Args:
        chunks: this rank's parts of the model; several if pipeline stages are interleaved.

    Raises:
        ConversionError: the table and the modules do not name the same tensors.
    """
    named = named_tensors(chunks, table, sizes, ranks)
    heads = {row.op.mcore for row in table.params if row.of_head}
    have = {n: t for n, t in named.items() if is_factor(n) == table.of_adapter or n in heads}
    planned = tasks(table, sizes)
    # Layers for multi-token prediction (MTP) are built only on demand: transformers has none.
    further = any(task.param.optional and task.name in have for task in planned)
    if MTP_EMBEDDING in have:
        planned.append(whole_model_task(mtp_embedding(table.shape)))
    due = {
        task.name: task
        for task in planned
        if (further or not task.param.optional)
        and ranks.pp == task.stage(sizes, table)
        and task.expert_rank(sizes, table) in (None, ranks.ep)
    }
    check_modules(due, have, table)
    return [Held(task, have[name]) for name, task in due.items()]


def named_tensors(
    chunks: Sequence[nn.Module], table: ModelTable, sizes: ParallelSizes, ranks: Ranks
) -> dict[str, Tensor]:
    """Return parameters and persistent buffers, by their names in the whole model."""
    found: dict[str, Tensor] = {}
    for number, chunk in enumerate(chunks):
        layers = sizes.layers_of(ranks.pp, number, table.shape.num_layers)
        for name, tensor in _state(unwrapped(chunk)).items():
            found[global_name(name, layers.start, table, sizes, ranks)] = tensor
    return found


def unwrapped(chunk: nn.Module) -> nn.Module:
    """Return the model inside wrappers for data parallelism or half precision."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk


def check_modules(due: Mapping[str, Task], have: Iterable[str], table: ModelTable) -> None:
    """Raise unless the table and the model name the same tensors.

    Raises:
        ConversionError: lists the tensors that are in the table only, or in the model only.
    """
    have = set(have)
    lost, extra = sorted(set(due) - have), sorted(have - set(due))
    lines = [
        f"{len(names)} {what}: {', '.join(names[:_SHOWN])}"
        for names, what in ((lost, "in the table only"), (extra, "in the model only"))
        if names
    ]
    if lines:
        raise ConversionError(
            f"the table of {table.model_type} and the model that was built disagree; "
            + "; ".join(lines)
        )


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers, by name.

    `state_dict()` would also return Megatron-Core's extra states, and would detach the tensors.
    """
    parameters = dict(module.named_parameters())
    buffers = {
        f"{prefix}.{name}": buffer
        for prefix, owner in module.named_modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if name not in owner._non_persistent_buffers_set
    }
    return {**parameters, **buffers}


def is_factor(name: str) -> bool:
    """Return whether a tensor is a LoRA factor, by its name."""
    return ".lora_A." in name or ".lora_B." in name


def global_name(
    name: str, first_layer: int, table: ModelTable, sizes: ParallelSizes, ranks: Ranks
) -> str:
    """Return the name in the whole model of a tensor in a chunk.

    Args:
        name: name of the tensor in the chunk, where layers and experts are numbered from 0.
        first_layer: number of the chunk's first layer in the whole model.
    """

    def shifted(prefix: str, offset: int, name: str) -> str:
        return re.sub(
            re.escape(prefix) + r"(\d+)", lambda m: f"{prefix}{int(m[1]) + offset}", name, count=1
        )

    if name == EMBEDDING and ranks.pp > 0:
        # An embedding on any stage but the first belongs to the MTP layers.
        return MTP_EMBEDDING
    if name.startswith("decoder.layers."):
        name = shifted("decoder.layers.", first_layer, name)
    if ".local_experts." in name:
        each = sizes.experts_each(table.shape.num_experts)
        name = shifted(".local_experts.", ranks.ep * each, name)
    return name
