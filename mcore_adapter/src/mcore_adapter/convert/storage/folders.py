"""Folders with weights: Hugging Face checkpoints and Megatron layouts.

A Megatron layout stores dense parameters and experts in separate files. Thus dense parameters are
not repeated for each expert parallel rank, and experts are not repeated for each tensor parallel
rank of the dense parameters:

    dense-pp{p}-tp{t}.safetensors            dense parameters of stage p, tensor parallel rank t
    experts-pp{p}-ep{e}-etp{t}.safetensors   experts of stage p, expert parallel rank e, and tensor
                                             parallel rank t of experts
    mcore.json                               parallel sizes; bytes and tensors of every file
    config.json, tokenizer and so on         copied from the Hugging Face checkpoint

Tensors have their global Megatron names: layers and experts are numbered as in the model. The
virtual pipeline chunks of a stage share the files of the stage.
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
"""Version of the Megatron layout, which `mcore.json` names."""


@dataclass(frozen=True)
class HfFolder:
    """Hugging Face checkpoint, of which only the headers have been read."""

    path: Path
    config: Mapping[str, Any]
    """Content of `config.json`."""
    tensors: Mapping[str, Piece]
    """Place of each tensor, by Hugging Face name."""
    notes: tuple[str, ...] = ()
    """Notes for the user about the choice of files."""


@dataclass(frozen=True)
class McoreFolder:
    """Megatron layout, of which only the headers have been read."""

    path: Path
    config: Mapping[str, Any]
    """Content of `config.json`."""
    sizes: ParallelSizes
    vocab: int | None
    """Number of rows of the embedding without padding; None: no embedding, as in an adapter."""
    repeats: tuple[str, ...]
    """Repeated tensors that the original checkpoint stored, see `ModelTable.repeats`."""
    adapter: Mapping[str, Any] | None
    """Factors of an adapter, see `convert.lora.factors_to_json`; None: the folder is a model."""
    fused: bool
    """True if the original checkpoint had fused experts, see `convert.fused_experts`."""
    files: Mapping[str, Mapping[str, Piece]]
    """Place of each tensor, by file name and then by Megatron name."""

    @property
    def names(self) -> set[str]:
        """Megatron names of all tensors."""
        return {name for tensors in self.files.values() for name in tensors}


def open_folder(path: Path) -> HfFolder | McoreFolder:
    """Open a Hugging Face checkpoint or a Megatron layout and read its headers.

    Raises:
        ConversionError: the folder is neither of them, or is incomplete.
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
    """Open a Hugging Face checkpoint and read its headers.

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
    """Open a Megatron layout and read its headers.

    Raises:
        ConversionError: a file is missing, or its size or number of tensors differs from that in
            `mcore.json`.
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
    """Content of `mcore.json` after its types have been checked."""

    sizes: ParallelSizes
    vocab: int | None
    repeats: tuple[str, ...]
    adapter: Mapping[str, Any] | None
    fused: bool
    files: Mapping[str, tuple[int, int]]
    """Number of bytes and number of tensors of each file, by file name."""


def _read_meta(path: Path, meta: Mapping[str, Any]) -> _Meta:
    """Check the content `meta` of a file `mcore.json`, which lies at `path`.

    Raises:
        ConversionError: the content does not have the form that `write_meta` writes.
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
            # Layouts of earlier versions lack this key, and never have fused experts.
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
    """Return the value; raise ValueError unless it is a whole number from 0 on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _typed(kind: type[T], value: object) -> T:
    """Return the value; raise ValueError unless it is of this class."""
    if not isinstance(value, kind):
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return value


def _flag(value: object) -> bool:
    """Return the value; raise ValueError unless it is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _text(value: object) -> str:
    """Return the value; raise ValueError unless it is a text."""
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
    """Write `mcore.json`. The weight files must already have their final sizes.

    Args:
        vocab: number of rows of the embedding without padding; None: no embedding.
        repeats: repeated tensors that the original checkpoint stored, see `ModelTable.repeats`.
        adapter: factors of an adapter, see `convert.lora.factors_to_json`; None: of a model.
        fused: True if the original checkpoint had fused experts.
        num_tensors: number of tensors of each weight file, by file name.
    """
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
    """Return the name of the file with dense parameters; `rank` is the tensor parallel rank."""
    return f"dense-pp{stage}-tp{rank}.safetensors"


def expert_file(stage: int, expert_rank: int, rank: int) -> str:
    """Return the name of a file with experts; `rank` is the tensor parallel rank of experts."""
    return f"experts-pp{stage}-ep{expert_rank}-etp{rank}.safetensors"
