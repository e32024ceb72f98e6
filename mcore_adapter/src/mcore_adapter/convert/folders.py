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
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_adapter.convert.tensorfile import Piece, read_header
from mcore_adapter.errors import ConversionError
from mcore_adapter.sizes import ParallelSizes

META = "mcore.json"
FORMAT = 1
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


@dataclass(frozen=True)
class HfFolder:
    """A Hugging Face checkpoint, its headers read."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Piece]


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
        raise ConversionError(
            f"{path} is quantized ({quantized.get('quant_method')}); convert it to bf16 first, for "
            "instance with AutoModelForCausalLM.from_pretrained(..., dtype='bfloat16')"
        )
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map: dict[str, str] = read_json(index)["weight_map"]
        tensors = {}
        for name in sorted(set(weight_map.values())):
            if not (path / name).is_file():
                raise ConversionError(f"{path / name} is missing, and {index.name} names it")
            tensors.update(read_header(path / name))
        lost = sorted(set(weight_map) - set(tensors))
        if lost:
            raise ConversionError(f"{index} promises {lost[0]}, which no file has")
        return HfFolder(path, config, tensors)
    single = path / "model.safetensors"
    if not single.is_file():
        raise ConversionError(
            f"{path} has neither model.safetensors nor {index.name}; weights in other formats must "
            "be saved again with save_pretrained"
        )
    return HfFolder(path, config, read_header(single))


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
    files = {}
    for name, expected in meta["files"].items():
        file = path / name
        if not file.is_file():
            raise ConversionError(f"{file} is missing, and {META} names it")
        if file.stat().st_size != expected["bytes"]:
            raise ConversionError(
                f"{file} has {file.stat().st_size} bytes, {META} says {expected['bytes']}; it is "
                "truncated or of another conversion"
            )
        files[name] = read_header(file)
        if len(files[name]) != expected["tensors"]:
            raise ConversionError(
                f"{file} has {len(files[name])} tensors, {META} says {expected['tensors']}"
            )
    sizes = dict(meta["sizes"])
    sizes["layers"] = tuple(sizes["layers"]) if sizes["layers"] is not None else None
    return McoreFolder(
        path=path,
        config=read_json(path / "config.json"),
        sizes=ParallelSizes(**sizes),
        vocab=meta["vocab"],
        repeats=tuple(meta["repeats"]),
        adapter=meta["adapter"],
        files=files,
    )


def write_meta(
    folder: Path,
    sizes: ParallelSizes,
    *,
    model_type: str,
    vocab: int | None,
    repeats: Iterable[str],
    adapter: Mapping[str, Any] | None,
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
        "files": {
            name: {"bytes": (folder / name).stat().st_size, "tensors": count}
            for name, count in num_tensors.items()
        },
    }
    (folder / META).write_text(json.dumps(meta, indent=2))


def copy_companions(src: Path, dst: Path, dtype: str | None = None) -> None:
    """Configuration, tokenizer, generation settings, code, licence: all but the weights.

    Args:
        dtype: what the weights were converted to, which `config.json` names.
    """
    for file in src.iterdir():
        hidden = file.name.startswith(".")
        if file.is_file() and not hidden and file.name != META and not is_weights(file.name):
            shutil.copyfile(file, dst / file.name)
    config = dst / "config.json"
    if dtype is not None and config.is_file():
        found = read_json(config)
        name = "torch_dtype" if "torch_dtype" in found else "dtype"
        found[name] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype]
        config.write_text(json.dumps(found, indent=2) + "\n")


def is_weights(name: str) -> bool:
    return name.endswith(_WEIGHTS)


def read_json(path: Path) -> dict[str, Any]:
    """
    Raises:
        ConversionError: there is no such file, or it holds something else.
    """
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConversionError(f"{path} is missing") from error
    except ValueError as error:
        raise ConversionError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConversionError(f"{path} holds {type(found).__name__}, expected an object")
    return found


def dense_file(stage: int, rank: int) -> str:
    return f"dense-pp{stage}-tp{rank}.safetensors"


def expert_file(stage: int, expert_rank: int, rank: int) -> str:
    return f"experts-pp{stage}-ep{expert_rank}-etp{rank}.safetensors"
