"""Files beside the weights: configuration, tokenizer, generation settings, code, licence."""

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
    """Copy the files and folders of a checkpoint, except weights and hidden files.

    A folder with weights is not copied, because it holds another model, such as `original`, or a
    training checkpoint. Links to nowhere and links to a folder above themselves are not copied
    either. `note` is called for each of these.

    Args:
        dst: existing folder to copy to.
        dtype: data type that the weights were converted to, which is set in `config.json`, one of
            `arrays.FLOATS`; None: `config.json` is copied unchanged.
        without: names of files and folders directly in `src` that are not copied.
    """
    _copy(src, dst, without, note, (src.resolve(),))
    config = dst / "config.json"
    if dtype is not None and config.is_file():
        found = read_json(config)
        name = "torch_dtype" if "torch_dtype" in found else "dtype"
        found[name] = _DTYPES[dtype]
        config.write_text(json.dumps(found, indent=2) + "\n")


def is_weights(name: str) -> bool:
    """Return True if a file of this name holds weights or an index of weights."""
    return name.endswith(_WEIGHTS)


def _copy(
    src: Path,
    dst: Path,
    without: tuple[str, ...],
    note: Callable[[str], None],
    above: tuple[Path, ...],
) -> None:
    """Copy a folder and the folders below it, except weights and hidden files.

    Args:
        without: names of files and folders directly in `src` that are not copied.
        above: `src` and the folders above it that are being copied, with links resolved. A link to
            one of them is not followed, because copying would never end.
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
    """Return True if the folder or a folder below it has weights.

    The folder itself may be a link. Links to folders below it are not followed.
    """
    return any(is_weights(name) for _, _, names in os.walk(folder) for name in names)
