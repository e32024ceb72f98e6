"""What the folders of all training backends have in common.

A checkpoint is one folder: what its backend writes, `rng_<rank>.json`, and last of all `meta.json`,
which says which model and update it is of.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from roll.config.sections.model import ModelConfig
from roll.core.errors import CheckpointError
from roll.models import lora
from roll.strategy.training.random_states import random_states, read_random_states

FORMAT = 2
"""Of 1, random states and the index of FSDP2's shards were pickles, which can run code."""


def finish(path: Path, identity: dict[str, Any], **progress: Any) -> None:
    """Write the random states and, when all ranks have written theirs, `meta.json`; collective.

    Args:
        identity: `model_type`, and the shapes of `tensors`.
        progress: what the backend's `load` wants to know.
    """
    _rng_file(path).write_text(json.dumps(random_states()))
    dist.barrier()
    if dist.get_rank() == 0:
        meta = {"format": FORMAT, "world_size": dist.get_world_size(), **progress, **identity}
        (path / "meta.json").write_text(json.dumps(meta, indent=1))
    dist.barrier()


def begin(path: Path, identity: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What `finish` wrote: the meta data and this rank's random states, None of a rank that the
    saving run did not have.

    Raises:
        CheckpointError: a file is missing or damaged, or belongs to another model.
    """
    try:
        meta = json.loads((path / "meta.json").read_text())
        check_identity(path, meta, identity)
        rng = _rng_file(path)
        if dist.get_rank() >= meta["world_size"]:
            return meta, None
    except FileNotFoundError as error:
        raise CheckpointError(
            f"no complete checkpoint in {path}: {error.filename} is missing"
        ) from error
    except CheckpointError:  # which is a ValueError, too
        raise
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path / 'meta.json'} is damaged: {type(error).__name__}: {error}"
        ) from error
    if not rng.is_file():
        raise CheckpointError(f"no complete checkpoint in {path}: {rng} is missing")
    try:
        return meta, read_random_states(rng.read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{rng} is damaged: {type(error).__name__}: {error}") from error


def save_hf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    weights: Iterable[tuple[str, Tensor]],
) -> None:
    """A folder for `from_pretrained`; collective. Rank 0 writes.

    Args:
        weights: whole tensors as in the checkpoint, parameters in `dtype`.
    """
    is_writer = dist.get_rank() == 0
    kept: dict[str, Tensor] = {}
    for name, tensor in weights:
        if is_writer:
            kept[name] = tensor.cpu()
    if is_writer:
        path.mkdir(parents=True, exist_ok=True)
        # They have the checkpoint's names already.
        model.save_pretrained(path, state_dict=kept, save_original_format=False)
        # `save_pretrained` notes the dtype of the masters; what it wrote is `dtype`.
        save_companions(path, model.config, dtype, tokenizer)
    dist.barrier()


def save_adapter(
    path: Path,
    model: PreTrainedModel,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """A folder in PEFT's format; collective. Rank 0 writes.

    Args:
        tensors: what is trained, whole, by the names in `model`.
    """
    is_writer = dist.get_rank() == 0
    kept = {name: tensor.cpu() for name, tensor in tensors if is_writer}
    if is_writer:
        assert config.lora is not None
        lora.save(path, kept, config.lora, model, config.path)
        tokenizer.save_pretrained(path)
    dist.barrier()


def save_companions(
    path: Path, config: PretrainedConfig, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase
) -> None:
    """What stands beside the weights in a Hugging Face folder.

    Args:
        dtype: of the weights, which the config is to name.
    """
    config = copy.deepcopy(config)
    config.dtype = dtype
    config.save_pretrained(path)
    tokenizer.save_pretrained(path)


def check_identity(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """
    Args:
        found: `model_type` and the shapes of `tensors`, as the checkpoint says.
        expected: those of the model that is to be loaded.

    Raises:
        CheckpointError: they differ; says in what.
    """

    def fail(what: str) -> None:
        raise CheckpointError(
            f"checkpoint {path} belongs to another model: {what}; set `model.path` to the model "
            "it was trained from, or `resume: never`"
        )

    if found["format"] != FORMAT:
        raise CheckpointError(
            f"checkpoint {path} has format {found['format']!r}, and this version reads {FORMAT}: "
            "older ones hold pickles, which could run code. Go on with the version of roll that "
            "wrote it (its `roll merge` makes a Hugging Face folder of it, which `model.path` of a "
            "new run may name), or set `resume: never`"
        )
    if found["model_type"] != expected["model_type"]:
        fail(f"it has model type {found['model_type']!r}, this run {expected['model_type']!r}")
    if found.get("adapter") != expected.get("adapter"):
        fail(f"it has the adapter {found.get('adapter')}, this run {expected.get('adapter')}")
    theirs, ours = found["tensors"], expected["tensors"]
    for name in [*ours, *theirs]:
        if name not in theirs:
            fail(f"it has no {name!r}")
        if name not in ours:
            fail(f"it has {name!r}, this run's model does not")
        if theirs[name] != ours[name]:
            fail(f"its {name!r} has shape {theirs[name]}, this run's {ours[name]}")


def _rng_file(path: Path) -> Path:
    return path / f"rng_{dist.get_rank():05d}.json"
