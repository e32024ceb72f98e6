"""Checkpoints of sharded training, which can be loaded under any parallel layout.

The files hold each tensor of the model as its tensor parallel shards, under the tensor's name in
the whole model. Weights are stored in fp32 where the optimizer keeps fp32 copies. Adam's moments
are stored in the same way, because they have the shape of their parameter. If several ranks hold
the same shard, the first of them writes it; with a distributed optimizer, each of them writes its
own part. A rank that loads a checkpoint merges the shards of the saved layout and cuts its own
shard out of the full tensor. Saving and loading handle one tensor at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from mcore_adapter.checkpoint_reader import INDEX, WEIGHT, Saved, key_of
from mcore_adapter.convert.conversion_plan import Task
from mcore_adapter.convert.shards import Replicated
from mcore_adapter.convert.storage.output import (
    check_space,
    complete_or_absent,
    refuse_existing,
)
from mcore_adapter.convert.table import ModelTable
from mcore_adapter.errors import ConversionError
from mcore_adapter.load import shard_of
from mcore_adapter.local_tensors import Ranks, held_tensors
from mcore_adapter.optimizer_state import MOMENTS, ParameterState, states_of
from mcore_adapter.parallel_sizes import ParallelSizes
from mcore_adapter.shared_results import gather_results
from mcore_adapter.write import spec_of, written

_WHAT = "the checkpoint"


@dataclass(frozen=True)
class _Part:
    """The part of a shard that this rank writes."""

    key: str
    tensor: Tensor
    """Entries to write, as a one-dimensional view."""
    start: int
    """Index of the first entry in the flattened shard."""
    shape: tuple[int, ...]
    """Shape of the whole shard."""


@dataclass(frozen=True)
class _Announced:
    """Contents that a rank reports to rank 0 before it writes."""

    shards: dict[str, tuple[int, tuple[int, ...]]]
    """Start and shape of each part, by key; see `_Part`."""
    step: int
    """Number of steps that Adam has made."""
    num_bytes: int
    """Size of all parts, in bytes."""


def save(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    table: ModelTable,
    sizes: ParallelSizes,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint. A collective: all ranks call it.

    The folder gets its name at the end, so that it is either complete or absent.

    Args:
        chunks: this rank's chunks of the model, wrapped by `data_parallel`.
        folder: folder to create; must not exist, and all ranks must see it.
        extra: further values to keep, stored as JSON; only those of rank 0 are written.

    Raises:
        ConversionError: on all ranks, if `folder` exists or any rank could not write.
    """
    parts, every = _plan(chunks, optimizer, table, sizes)
    with ExitStack() as stack:

        def begin_folder() -> Path | None:
            if every is None:
                return None
            num_bytes = sum(each.num_bytes for each in every)
            return stack.enter_context(complete_or_absent(folder, num_bytes))

        def end(aside: Path) -> None:
            if every is not None:
                _write_index(aside / INDEX, every, sizes, extra or {})
                stack.close()

        aside = gather_results(begin_folder, _WHAT)[0]
        assert aside is not None
        gather_results(lambda: _write_parts(_file_in(aside), parts), _WHAT)
        gather_results(lambda: end(aside), _WHAT)


@dataclass(frozen=True)
class Began:
    """A checkpoint that has begun. Neither function is a collective, so both may run in a thread
    beside the training."""

    write: Callable[[], None]
    """Function that writes the file of this rank."""
    complete: Callable[[], None]
    """Function that writes the index. Rank 0 calls it after all ranks have written."""


def begin(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    table: ModelTable,
    sizes: ParallelSizes,
    *,
    copied: bool,
    moments: bool,
) -> Began:
    """Agree on who writes what, and make the folder. A collective.

    Unlike with `save`, an error later leaves the folder. The caller makes a folder around it that
    gets its name at the end.

    Args:
        copied: copy the tensors to the memory of the machine, so that the next step does not change
            what is written. If False, the checkpoint must be complete before it.
        moments: whether Adam's moments are written. Without them a restored optimizer begins anew.

    Raises:
        ConversionError: on all ranks, if `folder` exists or its disk has too little space.
    """
    parts, every = _plan(chunks, optimizer, table, sizes, moments=moments)
    if copied:
        parts = [replace(part, tensor=part.tensor.to("cpu", copy=True)) for part in parts]

    def make() -> None:
        if every is not None:
            refuse_existing(folder)
            folder.mkdir(parents=True)
            check_space(folder, sum(each.num_bytes for each in every))

    gather_results(make, _WHAT)

    def complete() -> None:
        assert every is not None, "only rank 0 knows what all ranks have written"
        _write_index(folder / INDEX, every, sizes, {})

    return Began(partial(_write_parts, _file_in(folder), parts), complete)


def _plan(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    table: ModelTable,
    sizes: ParallelSizes,
    *,
    moments: bool = True,
) -> tuple[list[_Part], list[_Announced] | None]:
    """Return the parts that this rank writes and, on rank 0, what each rank will write. A
    collective."""
    slots = states_of(chunks, optimizer)
    parts = list(_parts(chunks, slots, table, sizes, moments=moments))
    step = max((slot.step for slot in slots.values()), default=0) if moments else 0
    return parts, _announce(parts, step)


def _file_in(folder: Path) -> Path:
    """Return the path of this rank's file."""
    return folder / f"rank{dist.get_rank():05d}.safetensors"


@torch.no_grad()
def restore(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    table: ModelTable,
    sizes: ParallelSizes,
) -> dict[str, Any]:
    """Load weights and optimizer states of a checkpoint, and return its `extra`.

    Any layout may have written the checkpoint. Not a collective: every rank reads for itself.

    Raises:
        ConversionError: the folder is not a complete checkpoint of this model; nothing was changed.
    """
    ranks, slots = Ranks.of_this_process(), states_of(chunks, optimizer)
    held_here = held_tensors(chunks, table, sizes, ranks)
    saved = Saved(folder, table)
    for held in held_here:
        moments = MOMENTS if saved.step and _is_trained(held.tensor) else ()
        for kind in (WEIGHT, *moments):
            outline = shard_of(saved.outline(held.task, kind), held.task, sizes, ranks)
            if outline.shape != tuple(held.tensor.shape):
                raise ConversionError(
                    f"{folder} gives shape {list(outline.shape)} for {held.task.name}, which "
                    f"has {list(held.tensor.shape)}: it is of another model"
                )
    for held in held_here:

        def read(kind: str, task: Task = held.task) -> Tensor:
            return shard_of(saved.full(task, kind), task, sizes, ranks)

        shard = read(WEIGHT)
        held.tensor.copy_(shard)
        slot = slots.get(held.tensor)
        if slot is not None:
            slot.main.copy_(slot.part(shard))
            slot.set_adam(saved.step, {k: read(k) for k in MOMENTS} if saved.step else {})
    return saved.extra


def _parts(
    chunks: Sequence[DistributedDataParallel],
    slots: Mapping[Tensor, ParameterState],
    table: ModelTable,
    sizes: ParallelSizes,
    *,
    moments: bool,
) -> Iterator[_Part]:
    """Yield the parts that this rank writes.

    With a distributed optimizer, these are its parts of the state. If several ranks hold equal
    copies of a tensor, the first of them writes it.
    """
    ranks = Ranks.of_this_process()
    cut = chunks[0].ddp_config.use_distributed_optimizer
    for held in held_tensors(chunks, table, sizes, ranks):
        shard, shape = ranks.shard_of(held.task), tuple(held.tensor.shape)
        if isinstance(held.task.param.shard, Replicated) and shard:
            continue
        is_first = _copy_of(held.task) == 0
        slot = slots.get(held.tensor)
        if slot is not None and (cut or is_first):
            kept = slot.moments if moments else {}
            for kind, tensor in {WEIGHT: slot.main, **kept}.items():
                key = key_of(held.task, kind, shard)
                yield _Part(key, tensor.detach().view(-1), slot.start, shape)
        if is_first and not _is_trained(held.tensor):
            weight = held.tensor.detach().view(-1)
            yield _Part(key_of(held.task, WEIGHT, shard), weight, 0, shape)


def _is_trained(tensor: Tensor) -> bool:
    """Return whether an optimizer updates a tensor: not buffers, nor frozen parameters."""
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _copy_of(task: Task) -> int:
    """Return this rank's number among the data and context parallel ranks that hold copies of a
    tensor."""
    if task.expert is not None:
        return int(parallel_state.get_expert_data_parallel_rank())
    return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))


def _announce(parts: Sequence[_Part], step: int) -> list[_Announced] | None:
    """Return on rank 0 what each rank will write, on other ranks None. A collective."""
    mine = _Announced(
        {part.key: (part.start, part.shape) for part in parts},
        step,
        sum(part.tensor.nbytes for part in parts),
    )
    every = [mine] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, every)
    return every


def _write_parts(file: Path, parts: Sequence[_Part]) -> None:
    """Write parts to a safetensors file, which is created or replaced, and wait for the disk."""
    specs = {part.key: spec_of(part.tensor.shape, part.tensor.dtype) for part in parts}
    with written({file: specs}) as write:
        for part in parts:
            write(part.key, part.tensor)


def _write_index(
    path: Path, every: Sequence[_Announced], sizes: ParallelSizes, extra: dict[str, Any]
) -> None:
    """Write the index: for each shard its shape and the ranks that hold its parts, in order."""
    tensors: dict[str, Any] = {}
    for rank, each in enumerate(every):
        for key, (start, shape) in each.shards.items():
            tensors.setdefault(key, {"shape": shape, "parts": []})["parts"].append((start, rank))
    for found in tensors.values():
        found["parts"] = [rank for _, rank in sorted(found["parts"])]
    step = max(each.step for each in every)
    index = {"sizes": asdict(sizes), "step": step, "tensors": tensors, "extra": extra}
    path.write_text(json.dumps(index))
