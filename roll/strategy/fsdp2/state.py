"""Checkpoints of an FSDP2 model.

A checkpoint holds the shards of every rank, written by `torch.distributed.checkpoint`, and the
files of `strategy/training/checkpoint_state.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer
from transformers import PreTrainedModel

from roll.core.errors import CheckpointError
from roll.models import lora
from roll.strategy.fsdp2.files import IndexedReader, IndexedWriter
from roll.strategy.tensor_names import trained
from roll.strategy.training.checkpoint_state import begin, finish
from roll.strategy.training.random_states import set_random_states

_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(path: Path, model: PreTrainedModel, optimizer: Optimizer, updates: int) -> None:
    """Write the checkpoint. Collective.

    Args:
        updates: number of updates so far, skipped ones included.
    """
    path.mkdir(parents=True, exist_ok=True)
    tensors = _model_tensors(model)
    stepped = any(optimizer.state.values())
    if stepped:
        tensors |= _optimizer_tensors(model, optimizer)
    dcp_save(tensors, storage_writer=IndexedWriter(path))
    finish(path, _identity(model), updates=updates, optimizer_state=stepped)


def load(path: Path, model: PreTrainedModel, optimizer: Optimizer) -> int:
    """Restore what `save` wrote and return its `updates`. Collective.

    The number of ranks may differ from that of the saving run. A rank that the saving run did not
    have keeps its random states.

    Raises:
        CheckpointError: `meta.json` or the random states are missing, damaged or of another model;
            or the index is missing or damaged, or a file that it names is missing. Nothing has
            changed then. Or a file is damaged; then part of the state may have changed.
    """
    meta, rng = begin(path, _identity(model))
    reader = IndexedReader(path)
    reader.check_files()
    optimizer.state.clear()
    tensors = _model_tensors(model)
    if meta["optimizer_state"]:
        for group in optimizer.param_groups:
            for p in group["params"]:
                optimizer.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    **{name: torch.zeros_like(p) for name in _MOMENTS},
                }
        tensors |= _optimizer_tensors(model, optimizer)
    try:
        dcp_load(tensors, storage_reader=reader)
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        if isinstance(first, CheckpointError):
            raise first from error
        raise CheckpointError(
            f"checkpoint {path} is incomplete or damaged: {type(first).__name__}: {first}"
        ) from error
    set_random_states(rng)
    dist.barrier()
    return int(meta["updates"])


def _model_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the trained parameters and, unless the model has an adapter, its saved buffers."""
    named = {f"model.{name}": p.detach() for name, p in trained(model)}
    if lora.has_adapter(model):
        return named
    saved = model.state_dict()
    return named | {f"model.{name}": b for name, b in model.named_buffers() if name in saved}


def _optimizer_tensors(model: PreTrainedModel, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return step and moments of the trained parameters, named `optimizer.<parameter>.<key>`.

    The optimizer must have them, which it has after its first step.
    """
    tensors: dict[str, Tensor] = {}
    for name, p in trained(model):
        for key, value in optimizer.state[p].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def _identity(model: PreTrainedModel) -> dict[str, Any]:
    """Return the description of the model that `check_identity` compares."""
    shapes = {name: list(tensor.shape) for name, tensor in _model_tensors(model).items()}
    return {"model_type": model.config.model_type, "tensors": shapes} | lora.identity(model)
