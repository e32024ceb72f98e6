"""Conversions from folder to folder, as the command line offers them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mcore_adapter.convert import conversions, lora
from mcore_adapter.convert.conversions import Settings
from mcore_adapter.convert.fused_experts import (
    fused,
    names_in_files,
    table_as_adapted,
    table_as_stored,
)
from mcore_adapter.convert.storage.folders import META, HfFolder, open_folder
from mcore_adapter.convert.storage.json_file import read_json
from mcore_adapter.convert.storage.peft import (
    CONFIG,
    WEIGHTS,
    adapted_modules,
    deltas_of,
    open_peft,
)
from mcore_adapter.convert.storage.source import Source, source_of
from mcore_adapter.errors import ConversionError
from mcore_adapter.models import table_of
from mcore_adapter.parallel_sizes import ParallelSizes

PEFT_FOLDER = "adapter"
"""Name of the subfolder that holds the adapter when a model is written together with one."""


def open_source(path: Path, base: Path | None = None) -> Source:
    """Find every tensor of a model or an adapter.

    Args:
        path: a Hugging Face checkpoint, a Megatron layout, or an adapter in either format.
        base: folder of the model that a PEFT adapter changes. Default: the folder that the adapter
            names. Ignored if `path` is no PEFT adapter.

    Raises:
        ConversionError: `path` is none of these, is incomplete, or does not fit its model type.
        UnknownModelError: there is no table for the model type.
    """
    if is_peft(path):
        config = _base_config(path, base)
        folder = open_peft(path, config)
        table = table_as_adapted(table_of(config), adapted_modules(folder))
        targets = lora.factors_of(folder, table)
        source = source_of(folder, table, lora.adapter_plan(table, targets))
        return replace(source, adapter=lora.factors_to_json(targets))
    found = open_folder(path)
    table = table_of(found.config)
    if isinstance(found, HfFolder):
        shapes = {name: piece.spec.shape for name, piece in found.tensors.items()}
        return source_of(found, table_as_stored(table, shapes))
    if found.adapter is not None:
        targets = lora.factors_from_json(found.adapter, path / META)
        table = table_as_adapted(table, (m for each in targets.values() for m in each.modules))
        return source_of(found, table, lora.adapter_plan(table, targets))
    return source_of(found, fused(table) if found.fused else table)


def to_mcore(
    src: Path,
    dst: Path,
    sizes: ParallelSizes,
    settings: Settings | None = None,
    *,
    base: Path | None = None,
) -> None:
    """Convert a Hugging Face checkpoint, a Megatron layout or an adapter to a Megatron layout.

    Args:
        src: folder to read, see `open_source`.
        dst: folder to write; must not exist.
        base: folder of the model that a PEFT adapter changes, see `open_source`.

    Raises:
        McoreAdapterError: as `open_source` and `conversions.to_mcore` raise it.
    """
    source = open_source(src, base)

    def add_config(folder: Path) -> None:
        if is_peft(src):
            text = json.dumps(dict(source.folder.config), indent=2)
            (folder / "config.json").write_text(text)

    conversions.to_mcore(source, dst, sizes, settings or Settings(), finish=add_config)


def to_hf(
    src: Path,
    dst: Path,
    settings: Settings | None = None,
    *,
    adapter: Path | None = None,
    merge: bool = False,
    max_shard_bytes: int | None = None,
) -> None:
    """Convert a Megatron layout to Hugging Face files.

    Args:
        src: Megatron layout of a model, or of an adapter, which is written in PEFT format.
        dst: folder to write; must not exist.
        adapter: folder of an adapter of the model, in either format.
        merge: add the adapter to the weights; otherwise write it to `dst/adapter` in PEFT format.
        max_shard_bytes: largest number of bytes of one file, see `conversions.to_hf`; ignored if
            `src` is an adapter, which becomes one file.

    Raises:
        ConversionError: the folders or arguments do not fit each other.
    """
    source, settings = open_source(src), settings or Settings()
    _check_arguments(source, adapter, merge)
    write = partial(conversions.to_hf, source, dst, settings, max_shard_bytes=max_shard_bytes)
    if source.adapter is not None:
        _to_peft(source, dst, settings)
    elif adapter is None:
        write()
    else:
        with TemporaryDirectory() as scratch:
            peft = _as_peft(adapter, Path(scratch) / "peft")
            deltas = deltas_of(open_peft(peft, source.folder.config))
            if merge:
                names = names_in_files(source.table)
                write(deltas={names.get(name, name): delta for name, delta in deltas.items()})
            else:
                write(finish=lambda to: _copy(peft, to / PEFT_FOLDER))


def is_peft(path: Path) -> bool:
    """Return True if the folder is an adapter in PEFT format."""
    return (path / CONFIG).is_file() and not (path / META).is_file()


def _check_arguments(source: Source, adapter: Path | None, merge: bool) -> None:
    """Raise `ConversionError` unless the arguments of `to_hf` fit each other and the source."""
    src = source.folder.path
    if isinstance(source.folder, HfFolder):
        raise ConversionError(f"{src} is in Hugging Face format already")
    if merge and adapter is None:
        raise ConversionError("--merge needs an --adapter")
    if source.adapter is not None and adapter is not None:
        raise ConversionError(f"{src} is an adapter itself; name a model, or no --adapter")


def _to_peft(source: Source, dst: Path, settings: Settings) -> None:
    """Write an adapter in PEFT format to `dst`: one file of weights, without `config.json`."""
    conversions.to_hf(
        source,
        dst,
        settings,
        single=WEIGHTS,
        # PEFT expects one file of weights; config.json belongs to the model, not to the adapter
        max_shard_bytes=1 << 62,
        finish=lambda folder: (folder / "config.json").unlink(),
    )


def _as_peft(adapter: Path, scratch: Path) -> Path:
    """Return `adapter` if it is in PEFT format; else convert it into `scratch` and return that.

    Raises:
        ConversionError: `adapter` is a model.
    """
    if is_peft(adapter):
        return adapter
    source = open_source(adapter)
    if source.adapter is None:
        raise ConversionError(f"{adapter} is a model, expected an adapter")
    _to_peft(source, scratch, Settings())
    return scratch


def _copy(src: Path, dst: Path) -> None:
    shutil.copytree(src, dst)


def _base_config(path: Path, base: Path | None) -> Mapping[str, Any]:
    """Read the base model's config from `base`, or from where the adapter at `path` says.

    Raises:
        ConversionError: there is no `config.json`.
    """
    named = base or Path(str(read_json(path / CONFIG).get("base_model_name_or_path")))
    if not (named / "config.json").is_file():
        raise ConversionError(
            f"{path} changes {named}, where no config.json is; name the folder of the model with "
            "--base"
        )
    return read_json(named / "config.json")
