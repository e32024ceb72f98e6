"""A model on Megatron-Core: this rank's part of it, and which Hugging Face tensors it makes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mcore_adapter.build.config import BuildOptions
from mcore_adapter.build.data_parallel import data_parallel
from mcore_adapter.build.model import build_model
from mcore_adapter.convert.plan import check_layout, tasks
from mcore_adapter.convert.table import ModelTable
from mcore_adapter.errors import AdapterError
from mcore_adapter.held import Held, Ranks, held_tensors
from mcore_adapter.load import load, read_config
from mcore_adapter.models import table_of
from mcore_adapter.sizes import ParallelSizes
from roll.config.model import ModelConfig
from roll.config.strategy import MegatronConfig
from roll.core.errors import ConfigError
from roll.strategy.checkpoint import folder_of, read_checkpoint
from roll.weight_sync.manifest import Manifest, TensorMeta, even_cuts


@dataclass(frozen=True)
class MegatronModel:
    chunks: Sequence[Any]
    """Modules of this rank; of a model that learns in Megatron-Core's data parallel wrapper."""
    table: ModelTable
    sizes: ParallelSizes
    manifest: Manifest
    vocab: int
    sequence_parallel: bool


def load_model(
    config: MegatronConfig, sizes: ParallelSizes, model: ModelConfig, *, trainable: bool
) -> MegatronModel:
    """Build this rank's part and fill it from the checkpoint; collective.

    Raises:
        ConfigError: the checkpoint's family has no table, something does not divide, or tensors
            are missing; says which.
    """
    dtype: torch.dtype = getattr(torch, model.dtype)
    folder = folder_of(model)
    options = BuildOptions(
        dtype=dtype,
        sequence_parallel=config.sequence_parallel,
        recompute=config.recompute,
        aux_loss_coeff=config.aux_loss_coef,
    )
    try:
        found = read_config(folder)
        table = table_of(found)
        check_layout(table, sizes)
        bare = build_model(found, sizes, options)
        load(folder, bare, table, sizes)
        held = held_tensors(bare, table, sizes, Ranks.of_this_process())
    except AdapterError as error:
        raise ConfigError(f"model.path: {model.path!r} on kind: megatron: {error}") from error
    for chunk in bare:
        chunk.requires_grad_(trainable)
        # Micro-batches are cut by tokens: each has a shape of its own, but see `micro_batches`.
        chunk.config.variable_seq_lengths = sizes.vpp == 1
    return MegatronModel(
        chunks=data_parallel(bare, distributed_optimizer=config.distributed_optimizer)
        if trainable
        else bare,
        table=table,
        sizes=sizes,
        manifest=_manifest(model, held, table, sizes),
        vocab=found["vocab_size"],
        sequence_parallel=bool(bare[0].config.sequence_parallel),
    )


def _manifest(
    model: ModelConfig, held: Sequence[Held], table: ModelTable, sizes: ParallelSizes
) -> Manifest:
    """Of what `mcore_adapter.gather.export` yields, in its order: shapes are the checkpoint's. Each
    rank, which sees every tensor whole for a moment, sends an equal part of it."""
    shapes = read_checkpoint(model).shapes
    own = {one.task.name: str(one.tensor.dtype).removeprefix("torch.") for one in held}
    every: list[dict[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    kinds = {name: kind for each in every if each is not None for name, kind in each.items()}
    metas, parts = [], dict[str, int]()
    for task in tasks(table, sizes):
        if task.name not in kinds or task.param.copy_of is not None:
            continue
        for ref in task.hf:
            parts[ref.name] = parts.get(ref.name, 0) + 1
            if ref.index is None or parts[ref.name] == table.shape.num_experts:
                metas.append(TensorMeta(ref.name, shapes[ref.name], kinds[task.name]))
    world = dist.get_world_size()
    cuts = tuple(even_cuts(meta.num_elements, 1, world) for meta in metas)
    return Manifest(tuple(metas), cuts)


def identity(model: MegatronModel) -> dict[str, object]:
    """What tells one model from another, whatever its layout."""
    shapes = {meta.name: list(meta.shape) for meta in model.manifest.tensors}
    found: dict[str, object] = json.loads(
        json.dumps({"model_type": model.table.model_type, "tensors": shapes})
    )
    return found
