"""What leaves and enters a model on disk: checkpoints of any layout, Hugging Face folders.

A checkpoint holds whole float32 tensors under Hugging Face names, so that any layout resumes it:
the folders `weights`, `exp_avg` and `exp_avg_sq` of safetensors files, `rng_<rank>.pt`, and last of
all `meta.json`, which says which model and optimizer step it is.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from mcore_adapter.errors import AdapterError
from mcore_adapter.held import Held
from mcore_adapter.load import fill
from roll.config.model import ModelConfig
from roll.core.errors import CheckpointError
from roll.models.load import load_config, load_tokenizer
from roll.strategy.megatron.export import full_weights
from roll.strategy.megatron.model import MegatronModel, identity
from roll.strategy.megatron.update import Update
from roll.strategy.state import FORMAT, check_identity, rng_states, set_rng_states

_MOMENTS = ("exp_avg", "exp_avg_sq")
_FILE_BYTES = 4 << 30
"""Of whole tensors that rank 0 keeps until a file is full."""


def save(path: Path, model: MegatronModel, update: Update) -> None:
    """Write the checkpoint; collective. Rank 0 writes the tensors."""
    rank = dist.get_rank()
    path.mkdir(parents=True, exist_ok=True)
    steps = _agree_steps(update)
    _write_folder(path / "weights", model, _masters(model, update))
    if steps:
        for moment in _MOMENTS:
            _write_folder(path / moment, model, _moments(update, moment))
    torch.save(rng_states(), path / f"rng_{rank:05d}.pt")
    dist.barrier()
    if rank == 0:
        meta = {
            "format": FORMAT,
            "updates": update.updates,
            "optimizer_steps": steps,
            "world_size": dist.get_world_size(),
            **identity(model),
        }
        (path / "meta.json").write_text(json.dumps(meta, indent=1))
    dist.barrier()


def load(path: Path, model: MegatronModel, update: Update) -> None:
    """Read what `save` wrote, under any layout; no rank waits for another but at the end.

    A rank that the saving run did not have keeps its random state.

    Raises:
        CheckpointError: files are missing or belong to another model, which is found out before
            anything changes; a damaged file only in the middle.
    """
    try:
        meta = json.loads((path / "meta.json").read_text())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"no complete checkpoint in {path}: {error.filename} is missing"
        ) from error
    check_identity(path, meta, identity(model))
    optimizer = update.optimizer
    optimizer.state.clear()
    steps = meta["optimizer_steps"]
    for w in update.weights if steps else ():
        optimizer.state[w.master] = {
            "step": torch.tensor(float(steps), device=w.master.device),
            **{name: torch.zeros_like(w.master) for name in _MOMENTS},
        }
    try:
        _read_folder(path / "weights", model, _masters(model, update))
        if steps:
            for moment in _MOMENTS:
                _read_folder(path / moment, model, _moments(update, moment))
    except (AdapterError, OSError) as error:
        raise CheckpointError(f"checkpoint {path} is incomplete: {error}") from error
    update.refresh()
    update.updates = int(meta["updates"])
    rng = path / f"rng_{dist.get_rank():05d}.pt"
    if rng.exists():
        set_rng_states(torch.load(rng, weights_only=False))
    dist.barrier()


def save_hf(path: Path, model: MegatronModel, model_config: ModelConfig) -> None:
    """A folder for `from_pretrained`; collective. Rank 0 writes."""
    is_writer = dist.get_rank() == 0
    weights = full_weights(model, wanted=is_writer)
    if not is_writer:
        for _ in weights:
            pass
    else:
        path.mkdir(parents=True, exist_ok=True)
        files = _write_files(path, "model", weights)
        if len(set(files.values())) > 1:
            index = {"metadata": {"total_size": model.manifest.num_bytes}, "weight_map": files}
            (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        else:
            (path / next(iter(files.values()))).rename(path / "model.safetensors")
        config = copy.deepcopy(load_config(model_config))
        config.dtype = getattr(torch, model_config.dtype)
        config.save_pretrained(path)
        load_tokenizer(model_config).save_pretrained(path)
    dist.barrier()


Values = Callable[[Tensor], Tensor | None]
"""Of a parameter or buffer: the tensor that is written or read in its place."""


def _masters(model: MegatronModel, update: Update) -> Values:
    masters = {w.parameter: w.master for w in update.weights}
    return lambda tensor: masters.get(tensor, tensor).detach()  # type: ignore[call-overload]


def _moments(update: Update, name: str) -> Values:
    state = update.optimizer.state
    found = {w.parameter: state[w.master][name] for w in update.weights}
    # Buffers, which have none, go along: a folder holds every tensor of the model.
    return lambda tensor: found.get(tensor, tensor)  # type: ignore[call-overload]


def _write_folder(folder: Path, model: MegatronModel, value: Values) -> None:
    is_writer = dist.get_rank() == 0
    tensors = full_weights(model, value=value, wanted=is_writer)
    if is_writer:
        folder.mkdir(exist_ok=True)
        _write_files(folder, "part", tensors)
    else:
        for _ in tensors:
            pass


def _write_files(
    folder: Path, name: str, tensors: Iterable[tuple[str, Tensor]]
) -> Mapping[str, str]:
    """Files of bounded size; returns the file of each tensor."""
    files: dict[str, str] = {}
    waiting: dict[str, Tensor] = {}
    count = num_bytes = 0

    def write() -> None:
        nonlocal count, num_bytes
        count += 1
        file = f"{name}-{count:05d}.safetensors"
        save_file(waiting, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(waiting, file))
        waiting.clear()
        num_bytes = 0

    for key, tensor in tensors:
        if waiting and num_bytes + tensor.nbytes > _FILE_BYTES:
            write()
        waiting[key] = tensor.cpu().contiguous()
        num_bytes += tensor.nbytes
    write()
    return files


def _read_folder(folder: Path, model: MegatronModel, value: Values) -> None:
    targets = []
    for held in model.held:
        target = value(held.tensor)
        if target is not None:
            targets.append(Held(held.task, target))
    fill(folder, targets, model.table, model.sizes, model.ranks)


def _agree_steps(update: Update) -> int:
    """Steps that AdamW has made; a stage without weights learns them from the others."""
    state = [int(values["step"]) for values in update.optimizer.state.values() if values]
    every: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, max(state, default=0))
    return max(steps or 0 for steps in every)
