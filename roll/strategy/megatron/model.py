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
from mcore_adapter.convert.plan import check_layout
from mcore_adapter.convert.table import ModelTable
from mcore_adapter.errors import AdapterError
from mcore_adapter.gather import exported
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
        manifest=_manifest(model, bare, table, sizes),
        vocab=found["vocab_size"],
        sequence_parallel=bool(bare[0].config.sequence_parallel),
    )


def _manifest(
    model: ModelConfig, chunks: Sequence[Any], table: ModelTable, sizes: ParallelSizes
) -> Manifest:
    """Of what `mcore_adapter.gather.export` yields, in its order. Each rank, which sees every
    tensor whole for a moment, sends an equal part of it."""
    found = exported(chunks, table, sizes, read_checkpoint(model).shapes)
    metas = tuple(
        TensorMeta(name, meta.shape, str(meta.dtype).removeprefix("torch."))
        for name, meta in found.items()
    )
    world = dist.get_world_size()
    return Manifest(metas, tuple(even_cuts(meta.num_elements, 1, world) for meta in metas))


def identity(model: MegatronModel) -> dict[str, object]:
    """What tells one model from another, whatever its layout."""
    shapes = {meta.name: list(meta.shape) for meta in model.manifest.tensors}
    found: dict[str, object] = json.loads(
        json.dumps({"model_type": model.table.model_type, "tensors": shapes})
    )
    return found
