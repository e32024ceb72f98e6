"""What lies beside weights: configuration, tokenizer, generation settings, code, licence."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from mcore_adapter.convert.storage.json_file import read_json

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def copy_companions(
    src: Path,
    dst: Path,
    dtype: str | None = None,
    *,
    without: tuple[str, ...] = (),
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """All but the weights, folders included. A folder with weights of its own is another model,
    such as `original`, or a training checkpoint: it is not copied, and `note` is told.

    Args:
        dtype: what the weights were converted to, which `config.json` names.
        without: names of files that are not copied.
    """
    _copy(src, dst, without, note, (src.resolve(),))
    config = dst / "config.json"
    if dtype is not None and config.is_file():
        found = read_json(config)
        name = "torch_dtype" if "torch_dtype" in found else "dtype"
        found[name] = _DTYPES[dtype]
        config.write_text(json.dumps(found, indent=2) + "\n")


def is_weights(name: str) -> bool:
    return name.endswith(_WEIGHTS)


def _copy(
    src: Path,
    dst: Path,
    without: tuple[str, ...],
    note: Callable[[str], None],
    above: tuple[Path, ...],
) -> None:
    """
    Args:
        above: the folders that `src` lies in, itself included: a link to one of them would never
            end.
    """
    for file in sorted(src.iterdir()):
        if file.name.startswith(".") or file.name in without:
            continue
        if file.is_file():
            if not is_weights(file.name):
                shutil.copyfile(file, dst / file.name)
        elif file.is_dir():
            if file.resolve() in above:
                note(f"left out {file}: a link to a folder that it lies in")
            elif _has_weights(file):
                note(f"left out {file}: it has weights of its own")
            else:
                (dst / file.name).mkdir()
                _copy(file, dst / file.name, (), note, (*above, file.resolve()))
        else:
            note(f"left out {file}: a link to nothing, or no file")


def _has_weights(folder: Path) -> bool:
    """Of links to folders, too, but not of links within."""
    return any(is_weights(name) for _, _, names in os.walk(folder) for name in names)
