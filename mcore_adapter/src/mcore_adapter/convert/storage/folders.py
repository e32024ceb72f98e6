"""Folders with weights: Hugging Face checkpoints, and Megatron layouts.

A Megatron layout holds dense parameters and experts in files of their own, so that neither expert
parallel nor tensor parallel ranks store anything twice that they share:

    dense-pp{p}-tp{t}.safetensors            what tensor parallel rank t of stage p holds
    experts-pp{p}-ep{e}-etp{t}.safetensors   its experts, on expert parallel rank e
    mcore.json                               sizes, and what to expect of every file
    config.json, tokenizer and so on         as they were in the Hugging Face checkpoint

Tensors have their global Megatron names: layers and experts are numbered as in the model. Virtual
pipeline chunks share the file of their stage.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from mcore_adapter.convert.storage.json_file import read_json
from mcore_adapter.convert.storage.tensor_file import Piece, read_header
from mcore_adapter.convert.storage.weight_files import is_inside, weights_of
from mcore_adapter.errors import ConversionError, LayoutError
from mcore_adapter.parallel_sizes import ParallelSizes

T = TypeVar("T")
META = "mcore.json"
FORMAT = 1


@dataclass(frozen=True)
class HfFolder:
    """A Hugging Face checkpoint, its headers read."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Piece]
    notes: tuple[str, ...] = ()
    """What a user should know of how it was read."""


@dataclass(frozen=True)
class McoreFolder:
    """A Megatron layout, its headers read."""

    path: Path
    config: Mapping[str, Any]
    sizes: ParallelSizes
    vocab: int | None
    """Rows of the embedding without padding; None where there is none, as in adapters."""
    repeats: tuple[str, ...]
    """Hugging Face tensors that were stored twice, see `ModelTable.repeats`."""
    adapter: Mapping[str, Any] | None
    """What `convert.lora` noted down, where these are the weights of an adapter."""
    fused: bool
    """It was made of a checkpoint with fused experts, see `convert.fused`."""
    files: Mapping[str, Mapping[str, Piece]]
    """By name of file and of tensor."""

    @property
    def names(self) -> set[str]:
        return {name for tensors in self.files.values() for name in tensors}


def open_folder(path: Path) -> HfFolder | McoreFolder:
    """
    Raises:
        ConversionError: it is neither, or not whole.
    """
    if (path / META).is_file():
        return open_mcore(path)
    if (path / "config.json").is_file():
        return open_hf(path)
    if not path.is_dir():
        raise ConversionError(f"{path} is no folder")
    raise ConversionError(
        f"{path} is neither a Hugging Face checkpoint, which has a config.json, nor a Megatron "
        f"layout, which has a {META}"
    )


def open_hf(path: Path) -> HfFolder:
    """
    Raises:
        ConversionError: weights are missing, quantized, corrupt or in another format.
    """
    config = read_json(path / "config.json")
    quantized = config.get("quantization_config")
    if quantized:
        how = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise ConversionError(
            f"{path} is quantized ({how}); convert it to bf16 first, for "
            "instance with AutoModelForCausalLM.from_pretrained(..., dtype='bfloat16')"
        )
    tensors, notes = weights_of(path)
    return HfFolder(path, config, tensors, notes)


def open_mcore(path: Path) -> McoreFolder:
    """
    Raises:
        ConversionError: a file is missing or does not have what `mcore.json` expects.
    """
    meta = read_json(path / META)
    if meta.get("format") != FORMAT:
        raise ConversionError(
            f"{path / META} has format {meta.get('format')!r}, expected {FORMAT}; write it again"
        )
    found = _read_meta(path / META, meta)
    files = {}
    for name, (size, count) in found.files.items():
        file = path / name
        if not file.is_file():
            raise ConversionError(f"{file} is missing, and {META} names it")
        if file.stat().st_size != size:
            raise ConversionError(
                f"{file} has {file.stat().st_size} bytes, {META} says {size}; it is "
                "truncated or of another conversion"
            )
        files[name] = read_header(file)
        if len(files[name]) != count:
            raise ConversionError(f"{file} has {len(files[name])} tensors, {META} says {count}")
    return McoreFolder(
        path=path,
        config=read_json(path / "config.json"),
        sizes=found.sizes,
        vocab=found.vocab,
        repeats=found.repeats,
        adapter=found.adapter,
        fused=found.fused,
        files=files,
    )


@dataclass(frozen=True)
class _Meta:
    """What `mcore.json` says, checked."""

    sizes: ParallelSizes
    vocab: int | None
    repeats: tuple[str, ...]
    adapter: Mapping[str, Any] | None
    fused: bool
    files: Mapping[str, tuple[int, int]]
    """Bytes and tensors of each."""


def _read_meta(path: Path, meta: Mapping[str, Any]) -> _Meta:
    """
    Raises:
        ConversionError: it was not written by `write_meta`.
    """
    try:
        sizes = dict(meta["sizes"])
        layers = sizes["layers"]
        sizes["layers"] = None if layers is None else tuple(map(_count, _typed(list, layers)))
        for name, size in sizes.items():
            if name != "layers" and not (name == "etp" and size is None):
                _count(size)
        made = _Meta(
            sizes=ParallelSizes(**sizes),
            vocab=None if meta["vocab"] is None else _count(meta["vocab"]),
            repeats=tuple(map(_text, _typed(list, meta["repeats"]))),
            adapter=None if meta["adapter"] is None else _typed(dict, meta["adapter"]),
            # Layouts of earlier versions have no such key, and were never made of fused experts.
            fused=_flag(meta.get("fused", False)),
            files={
                _text(name): (_count(entry["bytes"]), _count(entry["tensors"]))
                for name, entry in _typed(dict, meta["files"]).items()
            },
        )
    except (KeyError, TypeError, ValueError, AttributeError, LayoutError) as error:
        raise ConversionError(f"{path} is damaged ({error}); convert it again") from error
    outside = [name for name in made.files if not is_inside(name)]
    if outside:
        raise ConversionError(f"{path} names {outside[0]!r}, expected files of its folder")
    return made


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _typed(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no name")
    return value


def write_meta(
    folder: Path,
    sizes: ParallelSizes,
    *,
    model_type: str,
    vocab: int | None,
    repeats: Iterable[str],
    adapter: Mapping[str, Any] | None,
    fused: bool,
    num_tensors: Mapping[str, int],
) -> None:
    """Writes `mcore.json`, once all files have their size."""
    meta = {
        "format": FORMAT,
        "model_type": model_type,
        "sizes": asdict(sizes),
        "vocab": vocab,
        "repeats": sorted(repeats),
        "adapter": adapter,
        "fused": fused,
        "files": {
            name: {"bytes": (folder / name).stat().st_size, "tensors": count}
            for name, count in num_tensors.items()
        },
    }
    (folder / META).write_text(json.dumps(meta, indent=2))


def dense_file(stage: int, rank: int) -> str:
    return f"dense-pp{stage}-tp{rank}.safetensors"


def expert_file(stage: int, expert_rank: int, rank: int) -> str:
    return f"experts-pp{stage}-ep{expert_rank}-etp{rank}.safetensors"
