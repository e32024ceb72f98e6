"""The part of a checkpoint, and of a Hugging Face folder, that all training backends share.

A checkpoint is one folder. It holds the files that its backend writes, `rng_<rank>.json` for each
rank, and `meta.json`, which identifies the model and the update. `meta.json` is written last.

A save has two parts. The first is collective and takes the state of one moment. The second only
writes files, so it can run in a thread while training goes on.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from roll.config.sections.model import ModelConfig
from roll.core.errors import CheckpointError
from roll.models import lora
from roll.models.load import load_tokenizer
from roll.models.vision.folder import PROCESSOR_FILES
from roll.models.vision.parts import sees
from roll.strategy.further_layers import further_layers
from roll.strategy.hf_folder import folder_of
from roll.strategy.hf_weights import write_weights
from roll.strategy.interfaces import Saving
from roll.strategy.training.saved.random_states import random_states, read_random_states
from roll.weight_sync.manifest import Manifest, TensorMeta

GENERATION_FILES = ("generation_config.json",)
"""Files with settings of generation, such as further tokens that end a turn."""
FORMAT = 2
"""Version of the checkpoint format. Format 1 stored random states and the index of FSDP2's shards
as pickles, which can run code when they are loaded."""


def saving(
    path: Path,
    identity: dict[str, Any],
    write: Callable[[], object],
    *,
    merge: Callable[[], object] = lambda: None,
    **progress: Any,
) -> Saving:
    """Take the random states of this rank; return the save that writes them after the files of the
    backend, and `meta.json` at its end.

    Args:
        path: folder of the checkpoint, which must exist.
        identity: description of the model for `check_identity`: `model_type`, `tensors` (name ->
            shape as a list) and, if the model has an adapter, `adapter`.
        write: function that writes the backend's files of this rank.
        merge: function that rank 0 calls after all ranks have written.
        progress: further values that the backend's `load` needs, as plain JSON.
    """
    rng = json.dumps(random_states())
    meta = {"format": FORMAT, "world_size": dist.get_world_size(), **progress, **identity}
    about = json.dumps(meta, indent=1)

    def write_all() -> None:
        write()
        _rng_file(path).write_text(rng)

    def complete() -> None:
        merge()
        (path / "meta.json").write_text(about)

    return Saving(partial(_written, path, write_all), partial(_written, path, complete))


def save_now(save: Saving) -> None:
    """Write a checkpoint that has begun. Collective.

    Raises:
        CheckpointError: a rank could not write. All ranks raise an error.
    """
    _on_all(save.write)
    _on_all(save.complete if dist.get_rank() == 0 else lambda: None)


def host_copy(tensor: Tensor) -> Tensor:
    """Return a copy in the memory of the machine that shares nothing with `tensor`. A sharded
    tensor stays sharded.

    The copy is not in pinned memory: PyTorch would keep that for the process, in powers of two.
    """
    return tensor.detach().to("cpu", copy=True)


def _written(path: Path, work: Callable[[], None]) -> None:
    """Call `work`; CheckpointError, which names `path`, if a file could not be written."""
    try:
        work()
    except (OSError, RuntimeError) as error:  # PyTorch's writer raises RuntimeError
        raise CheckpointError(f"checkpoint {path} could not be written: {error}") from error


def _on_all(work: Callable[[], None]) -> None:
    """Call `work`; raise an error on every rank if it failed on any. Collective."""
    failed: Exception | None = None
    try:
        work()
    except Exception as error:  # noqa: BLE001 - raised below, when the other ranks know of it
        failed = error
    every: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, None if failed is None else str(failed))
    if failed is not None:
        raise failed
    for rank, problem in enumerate(every):
        if problem is not None:
            raise CheckpointError(f"rank {rank}: {problem}")


def begin(path: Path, identity: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Read what `saving` wrote: the content of `meta.json` and the random states of this rank.

    The random states are None if the run that saved the checkpoint did not have this rank.

    Args:
        identity: description of this run's model, as for `saving`.

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
    except CheckpointError:  # a subclass of ValueError
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path / 'meta.json'} is damaged: {type(error).__name__}: {error}"
        ) from error
    if not rng.is_file():
        raise CheckpointError(f"no complete checkpoint in {path}: {rng} is missing")
    try:
        return meta, read_random_states(rng.read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{rng} is damaged: {type(error).__name__}: {error}") from error


def save_trained(
    path: Path,
    model: PreTrainedModel,
    config: ModelConfig,
    *,
    merged: bool,
    factors: Callable[[], Iterable[tuple[str, Tensor]]],
    manifest: Callable[[], Manifest],
    weights: Callable[[], Iterable[tuple[str, Tensor]]],
) -> None:
    """Write the trained adapter in PEFT's format, or the whole model. Collective; rank 0 writes.

    The whole model gets the layers that predict further tokens from the checkpoint at
    `config.path`.

    Args:
        merged: write the whole model even if an adapter was trained, with its products added.
        factors: function that yields all trained parameters, with their names in `model`.
        manifest: function that describes the tensors of `weights`.
        weights: function that yields full tensors as in the Hugging Face checkpoint.
    """
    tokenizer = load_tokenizer(config)
    if config.lora is not None and not merged:
        save_adapter(path, model, config, tokenizer, factors())
    else:
        dtype: torch.dtype = getattr(torch, config.dtype)
        metas, tensors = manifest().tensors, weights()
        if model.can_generate() and dist.get_rank() == 0:  # a classifier does not speculate
            further = further_layers(config, metas)
            metas, tensors = (*metas, *further.metas), further.added_to(tensors)
        save_hf(path, model, tokenizer, dtype, metas, tensors)
        if dist.get_rank() == 0:
            copy_files(path, config, PROCESSOR_FILES if sees(model.config) else ())
            copy_files(path, config, GENERATION_FILES if model.can_generate() else ())


def save_hf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    metas: Sequence[TensorMeta],
    weights: Iterable[tuple[str, Tensor]],
) -> None:
    """Write a folder that `from_pretrained` loads. Collective; rank 0 writes, tensor by tensor.

    Args:
        dtype: dtype of the parameters, written to the config.
        metas: names, shapes and dtypes of the tensors of `weights`.
        weights: names and full tensors as in the Hugging Face checkpoint, parameters in `dtype`.
    """
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
        _write_settings(path, model)
        # `save_pretrained` puts the dtype of the master weights into the config, but the tensors
        # have `dtype`.
        save_companions(path, model.config, dtype, tokenizer)
        ignored = set(model._keys_to_ignore_on_save or ())
        write_weights(
            path,
            [meta for meta in metas if meta.name not in ignored],
            ((name, tensor) for name, tensor in weights if name not in ignored),
        )
    else:
        deque(weights, maxlen=0)
    dist.barrier()


def _write_settings(path: Path, model: PreTrainedModel) -> None:
    """Write what transformers writes without tensors: the config, and a model's own code.

    Settings of `generate` are copied from the checkpoint (`GENERATION_FILES`), because transformers
    refuses to write some that it has read, such as a temperature without `do_sample`.
    """
    if not model.can_generate():
        model.save_pretrained(path, state_dict={}, save_original_format=False)
        return
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        model.save_pretrained(path, state_dict={}, save_original_format=False)
    finally:
        model.generation_config = own
    for name in GENERATION_FILES:
        (path / name).unlink(missing_ok=True)


def save_adapter(
    path: Path,
    model: PreTrainedModel,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Write the adapter of `model` as a folder in PEFT's format. Collective; rank 0 writes.

    Args:
        tensors: names in `model` and full tensors of all trained parameters.
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
    """Write the config and the tokenizer to a Hugging Face folder.

    Args:
        dtype: dtype of the weights, written to the config.
    """
    config = copy.deepcopy(config)
    config.dtype = dtype
    config.save_pretrained(path)
    tokenizer.save_pretrained(path)


def copy_files(path: Path, config: ModelConfig, names: Iterable[str]) -> None:
    """Copy those of the named files that a model's folder has to a Hugging Face folder."""
    for name in names:
        file = folder_of(config) / name
        if file.is_file():
            shutil.copyfile(file, path / name)


def check_identity(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise an error unless a checkpoint belongs to this run's model.

    Args:
        path: folder of the checkpoint, for the message.
        found: content of the checkpoint's `meta.json`: `format`, and the keys of `expected`.
        expected: description of this run's model: `model_type`, `tensors` (name -> shape as a list)
            and, if the model has an adapter, `adapter` (any JSON, compared as a whole).

    Raises:
        CheckpointError: the format is not supported or the models differ. The message names the
            difference.
        KeyError: one of the keys is missing, apart from `adapter`.
    """

    def fail(what: str) -> None:
        raise CheckpointError(
            f"checkpoint {path} belongs to another model: {what}; set `model.path` to the model "
            "it was trained from, `model.freeze` to what was frozen then and `mtp_loss_weight` "
            "(megatron) as it was, or `resume: never`"
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
    """Return the path of the file with this rank's random states."""
    return path / f"rng_{dist.get_rank():05d}.json"
