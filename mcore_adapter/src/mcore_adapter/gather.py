"""Export of a model from its shards to full Hugging Face tensors.

Conversion needs no other collectives than those in this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_adapter.convert.conversion_plan import Task, tasks
from mcore_adapter.convert.shapes import hf_shapes
from mcore_adapter.convert.table import ModelTable
from mcore_adapter.local_tensors import Ranks, held_tensors
from mcore_adapter.parallel_sizes import ParallelSizes

ExportedValue = Callable[[Tensor], Tensor | None]
"""Function that takes a parameter or a buffer and returns the tensor to export in its place, or
None to export nothing."""

ShardTransform = Callable[[str, Tensor], Tensor]
"""Function that takes a tensor's Megatron name and this rank's shard, and returns the shard to send
in its place, with the same shape and dtype."""


def weight(tensor: Tensor) -> Tensor | None:
    """Return the tensor itself, detached."""
    return tensor.detach()


def gradient(tensor: Tensor) -> Tensor | None:
    """Return a parameter's gradient, wherever Megatron-Core keeps it; None if it has none.

    The gradient is that of the whole batch only after `finalize_model_grads`.
    """
    if not isinstance(tensor, nn.Parameter):
        return None
    kept: Tensor | None = getattr(tensor, "main_grad", None)
    return kept if kept is not None else tensor.grad


@dataclass(frozen=True)
class ShapeAndDtype:
    """Shape and dtype of a tensor, which may lie on another rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def export(
    chunks: Sequence[nn.Module],
    table: ModelTable,
    sizes: ParallelSizes,
    *,
    value: ExportedValue = weight,
    change: ShardTransform | None = None,
    wanted: bool = True,
    bucket_bytes: int = 256 << 20,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face name and the full tensor of each weight, in the order of the model.

    A collective: all ranks must iterate to the end, with the same arguments except `wanted`.

    Args:
        value: function that returns what is exported of each tensor (`weight`, `gradient` or your
            own).
        change: function that changes this rank's shard of each tensor, called just before the shard
            is sent.
        wanted: whether this rank gets the tensors; if False, it yields nothing and only takes part.
        bucket_bytes: size of the full tensors that are sent together, in bytes.
    """
    ranks = Ranks.of_this_process()
    mine: dict[str, Tensor] = {}
    for held in held_tensors(chunks, table, sizes, ranks):
        found = value(held.tensor)
        if found is not None:
            mine[held.task.name] = found
    metas, device = _metas_of_all(mine), _device(mine, chunks)
    due = [t for t in tasks(table, sizes) if t.name in metas and t.param.copy_of is None]
    stacks: dict[str, dict[int, Tensor]] = {}
    for bucket in _buckets(due, table, sizes, metas, bucket_bytes):
        now = {task.name: mine[task.name] for task in bucket if task.name in mine}
        if change is not None:
            now = {name: change(name, tensor) for name, tensor in now.items()}
        shards = _share(bucket, now, metas, table, sizes, ranks, device)
        if not wanted:
            continue
        for task, parts in zip(bucket, shards, strict=True):
            yield from _to_hf(task, parts, table, stacks)


def exported(
    chunks: Sequence[nn.Module],
    table: ModelTable,
    sizes: ParallelSizes,
) -> dict[str, ShapeAndDtype]:
    """Return shape and dtype of each weight that `export` yields, by name, in the same order.

    A collective.
    """
    ranks = Ranks.of_this_process()
    held = held_tensors(chunks, table, sizes, ranks)
    metas = _metas_of_all({one.task.name: one.tensor for one in held})
    found: dict[str, ShapeAndDtype] = {}
    parts: Counter[str] = Counter()
    for task in tasks(table, sizes):
        if task.name not in metas or task.param.copy_of is not None:
            continue
        for ref, shape in zip(task.hf, hf_shapes(task, table), strict=True):
            parts[ref.name] += 1
            if ref.index is None or parts[ref.name] == table.shape.num_experts:
                found[ref.name] = ShapeAndDtype(tuple(map(int, shape)), metas[task.name].dtype)
    return found


def _metas_of_all(mine: dict[str, Tensor]) -> dict[str, ShapeAndDtype]:
    """Return shape and dtype of the shards of all ranks, by Megatron name. A collective.

    A rank's own modules do not show the shapes of tensors that other ranks hold.
    """
    own = {name: ShapeAndDtype(tuple(t.shape), t.dtype) for name, t in mine.items()}
    every: list[dict[str, ShapeAndDtype] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return {name: meta for metas in every if metas is not None for name, meta in metas.items()}


def _buckets(
    due: Sequence[Task],
    table: ModelTable,
    sizes: ParallelSizes,
    metas: dict[str, ShapeAndDtype],
    bucket_bytes: int,
) -> Iterator[list[Task]]:
    """Yield groups of neighbouring tensors with the same stage, expert rank and dtype.

    The full tensors (all shards) of a group have at most `bucket_bytes`, unless there is just one.
    """
    bucket: list[Task] = []
    filled, last = 0, None
    for task in due:
        size = metas[task.name].num_bytes * task.shards(sizes)
        kind = (_owners(task, table, sizes), metas[task.name].dtype)
        if bucket and (kind != last or filled + size > bucket_bytes):
            yield bucket
            bucket, filled = [], 0
        last = kind
        bucket.append(task)
        filled += size
    if bucket:
        yield bucket


def _owners(task: Task, table: ModelTable, sizes: ParallelSizes) -> tuple[int, int | None]:
    """Return the stage and the expert parallel rank that send a tensor; None: any such rank."""
    return task.stage(sizes, table), task.expert_rank(sizes, table)


def _share(
    bucket: list[Task],
    mine: dict[str, Tensor],
    metas: dict[str, ShapeAndDtype],
    table: ModelTable,
    sizes: ParallelSizes,
    ranks: Ranks,
    device: torch.device,
) -> list[list[Tensor]]:
    """Return one list of shards for each tensor in the bucket, on every rank. A collective.

    The ranks that hold the shards gather them, then broadcast them to the other expert parallel
    ranks and to the other stages. A list is in the order of the tensor parallel ranks. `mine` are
    this rank's shards by Megatron name.
    """
    from megatron.core import parallel_state as groups

    stage, expert_rank = _owners(bucket[0], table, sizes)
    expert = bucket[0].expert is not None
    count = bucket[0].shards(sizes)
    lengths = [metas[task.name].num_bytes for task in bucket]
    every = torch.empty(count, sum(lengths), dtype=torch.uint8, device=device)
    if ranks.pp == stage and expert_rank in (None, ranks.ep):
        own = torch.cat([_bytes_of(mine[task.name]) for task in bucket])
        group = (
            groups.get_expert_tensor_parallel_group()
            if expert
            else groups.get_tensor_model_parallel_group()
        )
        dist.all_gather_into_tensor(every.view(-1), own, group=group)
    if expert_rank is not None and sizes.ep > 1 and ranks.pp == stage:
        group = groups.get_expert_model_parallel_group()
        dist.broadcast(every, dist.get_global_rank(group, expert_rank), group=group)
    if sizes.pp > 1:
        group = groups.get_pipeline_model_parallel_group()
        dist.broadcast(every, dist.get_global_rank(group, stage), group=group)
    rows = [row.split(lengths) for row in every]
    return [
        [row[i].view(metas[task.name].dtype).view(metas[task.name].shape) for row in rows]
        for i, task in enumerate(bucket)
    ]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _device(mine: dict[str, Tensor], chunks: Sequence[nn.Module]) -> torch.device:
    """Return the device of this rank's tensors; if it exports none, that of its model, with which
    other ranks share theirs: one that had them on a CPU would wait in another process group."""
    own = (*mine.values(), *(tensor for chunk in chunks for tensor in chunk.parameters()))
    return next((tensor.device for tensor in own), torch.device("cpu"))


def _to_hf(
    task: Task, shards: list[Tensor], table: ModelTable, stacks: dict[str, dict[int, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face tensors of a task.

    A Hugging Face tensor that holds all experts is yielded with its last expert; until then
    `stacks` collects the experts.
    """
    full = task.param.shard.merge(shards)
    if task.param.pads_vocab:
        full = full[: table.shape.vocab]
    for ref, tensor in zip(task.hf, task.param.op.to_hf(full, table.shape), strict=True):
        if ref.index is None:
            # A copy: a view would keep the memory of the whole bucket alive.
            yield ref.name, tensor.clone(memory_format=torch.contiguous_format)
            continue
        stack = stacks.setdefault(ref.name, {})
        stack[ref.index] = tensor.clone()
        if len(stack) == table.shape.num_experts:
            del stacks[ref.name]
            yield ref.name, torch.stack([stack[i] for i in range(len(stack))])
