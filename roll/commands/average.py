"""`roll average`: the mean of the weights of several models, or checkpoints, as one model."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from torch import Tensor

from roll.commands.merge import merge
from roll.config.sections.lifecycle import CheckpointConfig
from roll.core.errors import ConfigError
from roll.models.deferred.files import DTYPES
from roll.output_dir.checkpoints import (
    STATE,
    Checkpoints,
    is_named_as_one,
    require_free,
    write_folder,
)
from roll.output_dir.resume import EXPORT_MARK
from roll.strategy.hf_weights import write_weights
from roll.weight_sync.manifest import TensorMeta

INDEX = "model.safetensors.index.json"
_OF_NO_MATTER = ("_name_or_path", "transformers_version")
"""Keys of config.json in which models of one shape may differ."""


def average(
    sources: Sequence[Path],
    out: Path,
    *,
    last: int | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Write the mean of several models of one shape as a Hugging Face folder.

    Each tensor is summed in float32, one after another, and rounded to its dtype at the end. All
    that is no weight (config, tokenizer) is that of the last source.

    Args:
        sources: Hugging Face folders and checkpoints; or the `output_dir` of a run alone.
        out: folder to write, which must not exist.
        last: number of newest checkpoints to take of the run; None if `sources` are the models.
        trust_remote_code: as for `merge`, which reads checkpoints.

    Raises:
        ConfigError: `out` exists; there are fewer than two models, or they differ in more than the
            values of their weights.
        CheckpointError: a checkpoint is damaged.
    """
    require_free(out)
    chosen = list(sources) if last is None else _newest(sources, last)
    if len(chosen) < 2:
        raise ConfigError("a mean needs two models at least; name more, or a run with --last 2")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".average_", dir=out.parent) as aside:
        folders = []
        for number, source in enumerate(chosen):
            merged = Path(aside) / str(number)
            if (source / STATE).is_file():
                merge(source, merged, trust_remote_code=trust_remote_code)
            folders.append(merged if merged.exists() else source)
        _refuse_other_models(folders)
        write_folder(out, lambda path: _write_mean(folders, path))
    Console(stderr=True).print(
        f"the mean of {len(chosen)} models is in {out}: {', '.join(map(str, chosen))}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _newest(sources: Sequence[Path], last: int) -> list[Path]:
    """Return the newest `last` checkpoints of the only run in `sources`, oldest first.

    Raises:
        ConfigError: there are several runs, or too few checkpoints.
    """
    if len(sources) != 1:
        raise ConfigError(f"--last: takes the output_dir of one run, not {len(sources)} folders")
    folder = sources[0] / "checkpoints"
    complete = [path for _, path in Checkpoints(folder, CheckpointConfig()).complete()]
    if len(complete) < last:
        raise ConfigError(
            f"--last {last}: {folder} has {len(complete)} complete checkpoints; lower it, and let "
            "checkpoint.keep_last of later runs keep more"
        )
    return complete[-last:]


def _refuse_other_models(folders: Sequence[Path]) -> None:
    """Raise ConfigError unless all folders have the same config.json, but for its origin."""
    first = _config(folders[0])
    for folder in folders[1:]:
        found = _config(folder)
        for key in sorted(first.keys() | found.keys()):
            if first.get(key) != found.get(key):
                raise ConfigError(
                    f"{folder} is another model than {folders[0]}: {key} of config.json is "
                    f"{found.get(key)!r}, not {first.get(key)!r}"
                )


def _config(folder: Path) -> dict[str, Any]:
    """Return config.json of a folder without what is of no matter; ConfigError without one."""
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{folder} is an adapter, whose two factors have no mean of use; give the run's "
            "checkpoints, or write whole models with `roll merge` first"
        )
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return {key: value for key, value in found.items() if key not in _OF_NO_MATTER}
    except (OSError, ValueError, AttributeError) as error:
        if is_named_as_one(folder):
            beside = Checkpoints(folder.parent, CheckpointConfig())
            raise ConfigError(beside.told_of_missing(folder)) from None
        raise ConfigError(
            f"{folder} is neither a complete checkpoint ({STATE} is missing) nor the Hugging Face "
            f"folder of a model (config.json: {error})"
        ) from None


def _write_mean(folders: Sequence[Path], path: Path) -> None:
    """Write the mean of the weights of several folders, and the other files of the last one."""
    with ExitStack() as opened:
        models = [opened.enter_context(_tensors(folder)) for folder in folders]
        metas = [_meta(name, models, folders) for name in models[0]]
        for folder, model in zip(folders, models, strict=True):
            if extra := sorted(model.keys() - models[0].keys()):
                raise ConfigError(f"{folder} has {extra[0]}, which {folders[0]} lacks")
        for file in sorted(folders[-1].iterdir()):
            if file.is_file() and not _holds_weights(file) and file.name != EXPORT_MARK:
                shutil.copyfile(file, path / file.name)
        write_weights(path, metas, ((meta.name, _mean(meta.name, models)) for meta in metas))


def _holds_weights(file: Path) -> bool:
    """Return whether a file of a model's folder holds weights, or their index."""
    return file.suffix in (".safetensors", ".bin", ".pt") or file.name.endswith(".index.json")


@contextmanager
def _tensors(folder: Path) -> Iterator[dict[str, Any]]:
    """Open the safetensors files of a folder; yield the open file that has each tensor, by name.

    Raises:
        ConfigError: there are none, or one is missing or damaged.
    """
    with ExitStack() as opened:
        try:
            names = ["model.safetensors"]
            if (folder / INDEX).is_file():
                index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
                names = sorted(set(index["weight_map"].values()))
            files = [
                opened.enter_context(safe_open(folder / name, framework="pt")) for name in names
            ]
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ConfigError(f"{folder} has no readable safetensors files: {error}") from None
        yield {key: file for file in files for key in file.keys()}  # noqa: SIM118 (no mapping)


def _meta(name: str, models: Sequence[dict[str, Any]], folders: Sequence[Path]) -> TensorMeta:
    """Return name, shape and dtype of a tensor; ConfigError if not all folders have it alike."""
    found = []
    for model, folder in zip(models, folders, strict=True):
        if name not in model:
            raise ConfigError(f"{folder} lacks {name}, which {folders[0]} has")
        slices = model[name].get_slice(name)
        found.append((tuple(slices.get_shape()), slices.get_dtype()))
        if found[-1] != found[0]:
            raise ConfigError(
                f"{name} is {list(found[-1][0])} {found[-1][1]} in {folder}, and "
                f"{list(found[0][0])} {found[0][1]} in {folders[0]}; only models of one shape and "
                "dtype have a mean"
            )
    shape, dtype = found[0]
    if dtype not in DTYPES:
        raise ConfigError(f"{name} is of {dtype}: only numbers of 16 bits and more have a mean")
    return TensorMeta(name, shape, str(DTYPES[dtype]).removeprefix("torch."))


def _mean(name: str, models: Sequence[dict[str, Any]]) -> Tensor:
    """Return the mean of a tensor, summed in float32 and rounded to its dtype.

    Raises:
        ConfigError: it is not finite, or its values are no floating-point numbers and differ.
    """
    first: Tensor = models[0][name].get_tensor(name)
    if not first.is_floating_point():
        if not all(torch.equal(first, model[name].get_tensor(name)) for model in models[1:]):
            raise ConfigError(f"{name} is of {first.dtype} and differs, so it has no mean")
        return first
    total = first.to(torch.promote_types(first.dtype, torch.float32))
    for model in models[1:]:
        total = total + model[name].get_tensor(name)
    mean = (total / len(models)).to(first.dtype)
    if not bool(torch.isfinite(mean).all()):
        raise ConfigError(f"the mean of {name} is not finite")
    return mean
