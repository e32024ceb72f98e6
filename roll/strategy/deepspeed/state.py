"""Checkpoints of a DeepSpeed model, loadable with any number of ranks and any ZeRO stage.

A checkpoint holds a file of each rank (`shards.py`) and the files that all backends write
(`strategy/training/saved/checkpoint_state.py`). No tensor is gathered: each rank reads its pieces
from the files of all ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from roll.models import lora
from roll.strategy.deepspeed.shard_map import KINDS, MASTER, pieces, refresh, shape_of
from roll.strategy.deepspeed.shards import Shards, file_of, write
from roll.strategy.deepspeed.update import Update
from roll.strategy.interfaces import Saving
from roll.strategy.tensor_names import trained
from roll.strategy.training.saved.checkpoint_state import begin, host_copy, saving
from roll.strategy.training.saved.random_states import set_random_states


def begin_save(
    path: Path,
    engine: Any,
    model: PreTrainedModel,
    update: Update,
    *,
    copied: bool,
    optimizer: bool,
) -> Saving:
    """See `TrainStrategy.begin_save`."""
    path.mkdir(parents=True, exist_ok=True)
    # If every rank holds all states, rank 0 writes them.
    writes = update.shared or dist.get_rank() == 0
    kinds = KINDS if optimizer else (MASTER,)
    held = []
    for piece in pieces(engine, update.optimizer, model) if writes else ():
        tensors = {kind: piece.tensors[kind] for kind in kinds}
        if copied:
            tensors = {kind: host_copy(tensor) for kind, tensor in tensors.items()}
        held.append(replace(piece, tensors=tensors))
    return saving(
        path,
        _identity(model),
        partial(write, file_of(path, dist.get_rank()), held, kinds),
        updates=update.schedule.updates,
        optimizer_steps=update.steps if optimizer else 0,
        moments=optimizer,
    )


def load(path: Path, engine: Any, model: PreTrainedModel, update: Update) -> None:
    """Restore what `begin_save` saved; without moments in it, they are zero. Collective.

    The number of ranks and the ZeRO stage may differ from those of the saving run. A rank that the
    saving run did not have keeps its random states.

    Raises:
        CheckpointError: files are missing or damaged, or belong to another model. Nothing has
            changed then.
    """
    meta, rng = begin(path, _identity(model))
    kinds = KINDS if meta.get("moments", True) else (MASTER,)
    with Shards(path, meta["world_size"]) as shards, torch.no_grad():
        for name, parameter in trained(model):
            shards.check(name, shape_of(parameter).numel())
        for piece in pieces(engine, update.optimizer, model):
            for kind in set(KINDS) - set(kinds):
                piece.tensors[kind].zero_()
            shards.fill(piece, kinds)
    update.steps = meta["optimizer_steps"]
    update.schedule.updates = meta["updates"]
    refresh(engine, update.optimizer, model)
    set_random_states(rng)
    dist.barrier()


def _identity(model: PreTrainedModel) -> dict[str, Any]:
    """Return the description of the model that `check_identity` compares."""
    shapes = {name: list(shape_of(p)) for name, p in trained(model)}
    return {"model_type": model.config.model_type, "tensors": shapes} | lora.identity(model)
