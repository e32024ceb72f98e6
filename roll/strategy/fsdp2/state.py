"""Checkpoints of an FSDP2 model.

A checkpoint holds the shards of every rank, written by `torch.distributed.checkpoint`, and the
files of `strategy/training/saved/checkpoint_state.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from transformers import PreTrainedModel

from roll.core.errors import CheckpointError
from roll.models import lora
from roll.strategy.fsdp2.files import INDEX, IndexedReader, IndexedWriter
from roll.strategy.fsdp2.reference_copy import ReferenceCopy
from roll.strategy.fsdp2.update import Update
from roll.strategy.interfaces import Saving
from roll.strategy.tensor_names import trained
from roll.strategy.training.saved.checkpoint_state import begin, host_copy, saving
from roll.strategy.training.saved.random_states import set_random_states

_TABLE = 256
"""Elements of the largest tensor of a state that does not depend on the parameter's size."""


def begin_save(
    path: Path,
    model: PreTrainedModel,
    update: Update,
    reference: ReferenceCopy | None,
    *,
    copied: bool,
    optimizer: bool,
) -> Saving:
    """See `TrainStrategy.begin_save`. The ranks only plan here who writes what."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = _model_tensors(model) | _copied(reference)
    if optimizer:
        tensors |= _optimizer_tensors(model, update)
    if copied:
        tensors = {name: host_copy(tensor) for name, tensor in tensors.items()}
    writer = IndexedWriter(path, copied=copied)
    dcp_save(tensors, storage_writer=writer)
    progress = {
        "updates": update.schedule.updates,
        "optimizer": update.kind,
        "reference": reference is not None,
    }
    return saving(path, _identity(model), writer.write, merge=writer.write_index, **progress)


def load(
    path: Path, model: PreTrainedModel, update: Update, reference: ReferenceCopy | None
) -> None:
    """Restore what `begin_save` saved. Collective.

    The number of ranks may differ from that of the saving run. A rank that the saving run did not
    have keeps its random states.

    Raises:
        CheckpointError: `meta.json` or the random states are missing, damaged, of another model or
            of another kind of optimizer, or lack the reference; or the index is missing or damaged,
            or a file that it names is missing. Nothing has changed then. Or a file is damaged; then
            part of the state may have changed.
    """
    meta, rng = begin(path, _identity(model))
    _check_kind(path, meta, update)
    if reference is not None and not meta.get("reference"):
        raise CheckpointError(
            f"checkpoint {path} is of a run without a reference that follows the policy; leave out "
            "reference.follow, or set `resume: never`"
        )
    reader = IndexedReader(path)
    reader.check_files()
    _make_states(path, reader.read_metadata(), model, update)
    tensors = _model_tensors(model) | _optimizer_tensors(model, update) | _copied(reference)
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
    update.schedule.updates = int(meta["updates"])
    dist.barrier()


def _model_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the trained parameters and, unless the model has an adapter, its saved buffers."""
    named = {f"model.{name}": p.detach() for name, p in trained(model)}
    if lora.has_adapter(model):
        return named
    saved = model.state_dict()
    return named | {f"model.{name}": b for name, b in model.named_buffers() if name in saved}


def _optimizer_tensors(model: PreTrainedModel, update: Update) -> dict[str, Tensor]:
    """Return what this rank has of the optimizers' states, named `optimizer.<parameter>.<key>`.

    There is none of a parameter before its first step.
    """
    names = {p: name for name, p in trained(model)}
    return {
        f"{_prefix(names[p])}{key}": value
        for optimizer in update.optimizers
        for p, state in optimizer.saved.items()
        for key, value in state.items()
    }


def _copied(reference: ReferenceCopy | None) -> dict[str, Tensor]:
    """Return the values of the copy that is the reference; none without it."""
    values = {} if reference is None else reference.values
    return {f"reference.{name}": value for name, value in values.items()}


def _make_states(path: Path, saved: Metadata, model: PreTrainedModel, update: Update) -> None:
    """Give the optimizers states of zero, of the same tensors as in the checkpoint.

    Raises:
        CheckpointError: a tensor is too large to be one of them. Nothing has changed then.
    """
    outlines: dict[str, dict[str, tuple[torch.Size, torch.dtype]]] = {}
    named = {_prefix(name)[:-1]: p for name, p in trained(model)}
    for key, known in saved.state_dict_metadata.items():
        owner, _, part = key.rpartition(".")
        if owner not in named:
            continue
        assert isinstance(known, TensorStorageMetadata)
        if known.size.numel() > max(named[owner].numel(), _TABLE):
            raise CheckpointError(
                f"{path / INDEX} is damaged: {key} has the shape {tuple(known.size)}, more than "
                f"its parameter of {named[owner].numel()} elements"
            )
        outlines.setdefault(owner, {})[part] = (known.size, known.properties.dtype)
    of = {p: outlines.get(owner, {}) for owner, p in named.items()}
    for optimizer in update.optimizers:
        for p in optimizer.params:
            optimizer.restore(p, of[p])


def _prefix(name: str) -> str:
    """Return what the names of a parameter's states begin with."""
    return f"optimizer.{name}."


def _check_kind(path: Path, meta: dict[str, Any], update: Update) -> None:
    """Raise CheckpointError if a checkpoint is of another kind of optimizer."""
    kind = meta.get("optimizer", "adamw")  # earlier versions had no other, and did not name it
    if kind != update.kind:
        raise CheckpointError(
            f"checkpoint {path} is of a run with optimizer.kind = {kind}, and this one has "
            f"{update.kind}; keep the kind, or set `resume: never`"
        )


def _identity(model: PreTrainedModel) -> dict[str, Any]:
    """Return the description of the model that `check_identity` compares."""
    shapes = {name: list(tensor.shape) for name, tensor in _model_tensors(model).items()}
    return {"model_type": model.config.model_type, "tensors": shapes} | lora.identity(model)
