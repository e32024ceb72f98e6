"""Checkpoints and Hugging Face folders of a Megatron-Core model.

A checkpoint holds the folder `model` of `mcore_adapter.checkpoint` and the files of
`strategy/training/saved/checkpoint_state.py`. Every rank writes its own part to `model`. A run with
any other layout can load the checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from mcore_adapter import checkpoint
from mcore_adapter.errors import McoreAdapterError
from mcore_adapter.lora_io import write_peft
from mcore_adapter.write import spec_of, write_hf
from roll.config.sections.model import ModelConfig
from roll.core.errors import CheckpointError
from roll.models.load import load_config, load_tokenizer
from roll.models.vision.folder import PROCESSOR_FILES
from roll.strategy.further_layers import further_layers
from roll.strategy.interfaces import Saving
from roll.strategy.megatron.export import full_weights
from roll.strategy.megatron.model import MegatronModel, Trained, identity
from roll.strategy.megatron.update import Update
from roll.strategy.training.saved.checkpoint_state import (
    GENERATION_FILES,
    begin,
    copy_files,
    save_companions,
    saving,
)
from roll.strategy.training.saved.random_states import set_random_states


def begin_save(
    path: Path, model: MegatronModel, update: Update, *, copied: bool, optimizer: bool
) -> Saving:
    """See `TrainStrategy.begin_save`.

    Raises:
        CheckpointError: rank 0 could not begin to write. All ranks raise the error.
    """
    path.mkdir(parents=True, exist_ok=True)
    with _as_ours():
        began = checkpoint.begin(
            path / "model",
            model.chunks,
            update.optimizer,
            model.learns,
            model.sizes,
            copied=copied,
            moments=optimizer,
        )
    return saving(
        path,
        identity(model),
        _as_ours()(began.write),
        merge=_as_ours()(began.complete),
        updates=update.schedule.updates,
    )


def load(path: Path, model: MegatronModel, update: Update) -> None:
    """Restore what `begin_save` saved. Collective, but ranks wait for each other only at the end.

    The layout may differ from that of the saving run. A rank that the saving run did not have keeps
    its random states.

    Raises:
        CheckpointError: files are missing or damaged, or belong to another model. Nothing has
            changed then.
    """
    meta, rng = begin(path, identity(model))
    try:
        where = path / "model"
        checkpoint.restore(where, model.chunks, update.optimizer, model.learns, model.sizes)
    except McoreAdapterError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
    update.schedule.updates = int(meta["updates"])
    set_random_states(rng)
    dist.barrier()


@contextmanager
def _as_ours() -> Iterator[None]:
    """Raise errors of mcore_adapter inside the block as CheckpointError."""
    try:
        yield
    except McoreAdapterError as error:
        raise CheckpointError(str(error)) from error


def save_hf(path: Path, model: MegatronModel, model_config: ModelConfig) -> None:
    """Write the full model as a folder that `from_pretrained` loads. Collective; rank 0 writes.

    If the model trains an adapter, the adapter is added to the weights. A language model that does
    not train the layers that predict further tokens gets them from the checkpoint at `model.path`.
    """
    is_writer = dist.get_rank() == 0
    weights = full_weights(model, further=True, wanted=is_writer)
    if is_writer:
        path.mkdir(parents=True, exist_ok=True)
        metas, outline = (*model.manifest.tensors, *model.further), model.outline
        if outline is None:  # a classifier does not speculate
            further = further_layers(model_config, metas)
            metas, weights = (*metas, *further.metas), further.added_to(weights)
        write_hf(path, weights, {m.name: spec_of(m.shape, m.torch_dtype) for m in metas})
        dtype: torch.dtype = getattr(torch, model_config.dtype)
        config = load_config(model_config) if outline is None else outline.config
        save_companions(path, config, dtype, load_tokenizer(model_config))
        if outline is None:
            copy_files(path, model_config, (*PROCESSOR_FILES, *GENERATION_FILES))
    else:
        deque(weights, maxlen=0)
    dist.barrier()


def save_adapter(
    path: Path, model: MegatronModel, trained: Trained, model_config: ModelConfig
) -> None:
    """Write the adapter as a folder in PEFT's format. Collective; rank 0 writes.

    The factors have the dtype in which the model computes.
    """
    is_writer = dist.get_rank() == 0
    factors = full_weights(model, adapter=True, wanted=is_writer)
    if is_writer:
        path.mkdir(parents=True, exist_ok=True)
        write_peft(path, model_config.path, factors, trained.metas, trained.adapter)
        load_tokenizer(model_config).save_pretrained(path)
    else:
        deque(factors, maxlen=0)
    dist.barrier()
