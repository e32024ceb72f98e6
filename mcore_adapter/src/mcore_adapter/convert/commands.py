"""What the commands do: from folder to folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mcore_adapter.convert import conversions, lora
from mcore_adapter.convert.conversions import Settings
from mcore_adapter.convert.fused_experts import as_stored, fused
from mcore_adapter.convert.storage.folders import META, HfFolder, open_folder
from mcore_adapter.convert.storage.json_file import read_json
from mcore_adapter.convert.storage.source import Source, source_of
from mcore_adapter.errors import ConversionError
from mcore_adapter.models import table_of
from mcore_adapter.parallel_sizes import ParallelSizes

PEFT_FOLDER = "adapter"
"""Where the adapter lies in a Hugging Face folder that is written with one."""


def open_source(path: Path, base: Path | None = None) -> Source:
    """
    Args:
        path: a Hugging Face checkpoint, a Megatron layout, or an adapter in either format.
        base: of an adapter in PEFT format, the folder of the model that it changes; by default the
            one that it names.

    Raises:
        ConversionError: it is none of these, not whole, or does not fit its model type.
        UnknownModelError: there is no table for its model type.
    """
    if is_peft(path):
        config = _base_config(path, base)
        table = table_of(config)
        folder = lora.open_peft(path, config)
        targets = lora.targets_of(folder, table)
        source = source_of(folder, table, lora.adapter_plan(table, targets))
        return replace(source, adapter=lora.to_note(targets))
    found = open_folder(path)
    table = table_of(found.config)
    if isinstance(found, HfFolder):
        return source_of(found, as_stored(table, found.tensors))
    if found.adapter is not None:
        targets = lora.from_note(found.adapter, path / META)
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
    """Hugging Face, or another Megatron layout, to a Megatron layout."""
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
    """A Megatron layout to Hugging Face files.

    Args:
        adapter: an adapter of the model, in either format.
        merge: add it to the weights; otherwise it is written to `dst/adapter` in PEFT format.
    """
    source, settings = open_source(src), settings or Settings()
    if isinstance(source.folder, HfFolder):
        raise ConversionError(f"{src} is in Hugging Face format already")
    if merge and adapter is None:
        raise ConversionError("--merge needs an --adapter")
    if source.adapter is not None:
        if adapter is not None:
            raise ConversionError(f"{src} is an adapter itself; name a model, or no --adapter")
        _to_peft(source, dst, settings)
        return
    if adapter is None:
        conversions.to_hf(source, dst, settings, max_shard_bytes=max_shard_bytes)
        return
    with TemporaryDirectory() as scratch:
        peft = _as_peft(adapter, Path(scratch) / "peft")
        deltas = lora.deltas_of(lora.open_peft(peft, source.folder.config))
        conversions.to_hf(
            source,
            dst,
            settings,
            deltas=deltas if merge else None,
            max_shard_bytes=max_shard_bytes,
            finish=None if merge else lambda to: _copy(peft, to / PEFT_FOLDER),
        )


def is_peft(path: Path) -> bool:
    return (path / lora.CONFIG).is_file() and not (path / "mcore.json").is_file()


def _to_peft(source: Source, dst: Path, settings: Settings) -> None:
    conversions.to_hf(
        source,
        dst,
        settings,
        single=lora.WEIGHTS,
        # an adapter is one file, and the configuration of its model is not its own
        max_shard_bytes=1 << 62,
        finish=lambda folder: (folder / "config.json").unlink(),
    )


def _as_peft(adapter: Path, scratch: Path) -> Path:
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
    named = base or Path(str(read_json(path / lora.CONFIG).get("base_model_name_or_path")))
    if not (named / "config.json").is_file():
        raise ConversionError(
            f"{path} changes {named}, where no config.json is; name the folder of the model with "
            "--base"
        )
    return read_json(named / "config.json")
