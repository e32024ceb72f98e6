"""Checkpoints of sharded training that load under another layout.

Each tensor of the model lies in the files as its tensor parallel shards, under its name in the
whole model, written by the first of the ranks that hold the same; so do Adam's states, which have
the shape of their parameter. Whoever loads merges the shards of the layout that was and cuts those
of its own.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mcore_adapter.convert.plan import Task, tasks
from mcore_adapter.convert.shards import Replicated
from mcore_adapter.convert.table import ModelTable
from mcore_adapter.errors import ConversionError
from mcore_adapter.held import Held, Ranks, held_tensors
from mcore_adapter.load import pad_vocab
from mcore_adapter.sizes import ParallelSizes

INDEX = "index.json"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Slot:
    """Where the optimizer keeps what belongs to a parameter, or to this rank's part of it."""

    main: Tensor
    """What it updates: the parameter, a piece of it, or an fp32 copy of either."""
    state: dict[str, Tensor]
    start: int
    end: int
    """Entries of the flattened parameter."""


def save(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    table: ModelTable,
    sizes: ParallelSizes,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint; a collective. It is complete or absent: it gets its name at the end.

    Args:
        folder: must not exist, and be seen by all ranks.
        extra: what else to keep, as JSON; rank 0's is written.
    """
    aside = folder.with_name(folder.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    slots = slots_of(chunks, optimizer)
    steps = [int(slot.state["step"]) for slot in slots.values() if "step" in slot.state]
    ranks = Ranks.of_this_process()
    cut = chunks[0].ddp_config.use_distributed_optimizer
    mine: dict[str, Tensor] = {}
    for held in held_tensors(chunks, table, sizes, ranks):
        shard = ranks.shard_of(held.task)
        for kind, tensor in _kinds(held, slots, cut=cut):
            if _writes(held.task, shard):
                mine[_key(held.task.name, kind, shard)] = tensor
    file = f"rank{dist.get_rank():05d}.safetensors"
    save_file(mine, aside / file)
    _flush(aside / file)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (file, list(mine), max(steps, default=0)))
    if dist.get_rank() == 0:
        index = {
            "sizes": asdict(sizes),
            "step": max(step for _, _, step in every),
            "files": {key: file for file, keys, _ in every for key in keys},
            "extra": extra or {},
        }
        (aside / INDEX).write_text(json.dumps(index))
        _flush(aside / INDEX)
        aside.rename(folder)
    dist.barrier()


@torch.no_grad()
def restore(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    table: ModelTable,
    sizes: ParallelSizes,
) -> dict[str, Any]:
    """Weights and states of a checkpoint, whatever layout wrote it; returns its `extra`.

    Raises:
        ConversionError: the folder is no complete checkpoint of this model.
    """
    if not (folder / INDEX).is_file():
        raise ConversionError(f"{folder} has no {INDEX}: it is no complete checkpoint")
    index = json.loads((folder / INDEX).read_text())
    layers = index["sizes"]["layers"]
    was = ParallelSizes(**{**index["sizes"], "layers": None if layers is None else tuple(layers)})
    slots = slots_of(chunks, optimizer)
    ranks = Ranks.of_this_process()
    files = {name: safe_open(folder / name, "pt") for name in set(index["files"].values())}

    def read(task: Task, kind: str) -> Tensor:
        count = 1 if isinstance(task.param.shard, Replicated) else task.shards(was)
        keys = [_key(task.name, kind, shard) for shard in range(count)]
        absent = [key for key in keys if key not in index["files"]]
        if absent:
            raise ConversionError(f"{folder} lacks {absent[0]}: it is of another model")
        parts = [files[index["files"][key]].get_tensor(key) for key in keys]
        full = task.param.shard.merge(parts)
        if task.param.pads_vocab:
            full = pad_vocab(full[: table.shape.vocab], task.param, task.shards(sizes))
        return task.param.shard.split(full, task.shards(sizes))[ranks.shard_of(task)]

    for held in held_tensors(chunks, table, sizes, ranks):
        source = _saved_task(held.task, table, was)
        held.tensor.copy_(read(source, "weight"))
        slot = slots.get(held.tensor)
        if slot is None:
            continue
        if slot.main.dtype != held.tensor.dtype:
            slot.main.copy_(_part(read(source, "main"), slot))
        if index["step"]:
            slot.state["step"] = torch.tensor(float(index["step"]))
            for kind in MOMENTS:
                part = _part(read(source, kind), slot)
                slot.state[kind] = part.to(slot.main.device).clone().view(slot.main.shape)
    extra: dict[str, Any] = index["extra"]
    return extra


def slots_of(
    chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
) -> dict[Tensor, Slot]:
    """By parameter; with a distributed optimizer only those that this rank has a part of."""
    found: dict[Tensor, Slot] = {}
    models = {getattr(p, "main_param", p): p for chunk in chunks for p in chunk.parameters()}
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(each, DistributedOptimizer):
            for parameter, (group, order) in each.model_param_group_index_map.items():
                part = each._get_model_param_range_map(parameter)["param"]
                main = each.optimizer.param_groups[group]["params"][order]
                found[parameter] = Slot(main, each.optimizer.state[main], part.start, part.end)
            continue
        for group in each.optimizer.param_groups:
            for main in group["params"]:
                slot = Slot(main, each.optimizer.state[main], 0, main.numel())
                found[models[main]] = slot
    return found


def _kinds(held: Held, slots: dict[Tensor, Slot], *, cut: bool) -> Iterator[tuple[str, Tensor]]:
    """What belongs to a tensor, each in its shape; a collective if data parallel ranks have parts.

    All of them must take part, those that have no part and those that have all of it.
    """
    yield "weight", held.tensor.detach().contiguous()
    if not isinstance(held.tensor, torch.nn.Parameter):
        return
    slot = slots.get(held.tensor)
    group = (
        parallel_state.get_data_parallel_group()
        if held.task.expert is None
        else parallel_state.get_expert_data_parallel_group()
    )
    for kind in (*MOMENTS, "main"):
        part = None if slot is None else slot.main if kind == "main" else slot.state.get(kind)
        if part is not None and kind == "main" and part.dtype == held.tensor.dtype:
            # The parameter itself.
            part = None
        # [entries, and how many ranks have a part]
        whole = torch.zeros(held.tensor.numel() + 1, device=held.tensor.device)
        if slot is not None and part is not None:
            whole[slot.start : slot.end] = part.detach().flatten()
            whole[-1] = 1
        if cut:
            dist.all_reduce(whole, group=group)
        if whole[-1]:
            yield kind, whole[:-1].view(held.tensor.shape).clone()


def _writes(task: Task, shard: int) -> bool:
    """Whether this rank is the first of those that hold the same."""
    if isinstance(task.param.shard, Replicated) and shard:
        return False
    if task.expert is not None:
        return int(parallel_state.get_expert_data_parallel_rank()) == 0
    return int(parallel_state.get_data_parallel_rank()) == 0


def _saved_task(task: Task, table: ModelTable, was: ParallelSizes) -> Task:
    """Where a tensor lies in the files: copies are not there if the writer had one stage."""
    if task.param.copy_of is None or was.pp > 1:
        return task
    return next(t for t in tasks(table, was) if t.name == task.param.copy_of)


def _part(full: Tensor, slot: Slot) -> Tensor:
    return full.flatten()[slot.start : slot.end].view(slot.main.shape)


def _key(name: str, kind: str, shard: int) -> str:
    return f"{name}#{kind}#{shard}"


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
