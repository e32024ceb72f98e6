"""Headers of safetensors files, and whether the weights in a folder are whole. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.config.errors import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OTHERS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
"""Patterns of files that may hold weights in another form, which only loading can judge."""


def read_header(file: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file by name, with `shape` and `data_offsets`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no whole safetensors file; the text says what it is.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(8)
        length = int.from_bytes(first, "little")
        if first == b"version ":
            raise ValueError("is a pointer of Git LFS, no weights; `git lfs pull` fetches them")
        if size < 8 or length > size - 8:
            raise ValueError("is no safetensors file, or damaged; fetch or write it again")
        try:
            header = json.loads(opened.read(length))
            tensors = {name: each for name, each in header.items() if name != "__metadata__"}
            end = max((int(each["data_offsets"][1]) for each in tensors.values()), default=0)
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
            raise ValueError(
                "is no safetensors file, or damaged; fetch or write it again"
            ) from None
    whole = 8 + length + end
    if size < whole:
        raise ValueError(f"has only {size:,} of its {whole:,} bytes; fetch or write it again")
    return tensors


def check_weights(key: str, path: str) -> None:
    """Raise ConfigError if a folder of a model has no weights, or half of them, as after a download
    that broke off. A model that is not in a folder is not looked at.

    Args:
        key: key of the model in the config.
        path: folder, or name on the hub.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return
    single, index = folder / SINGLE, folder / INDEX
    files = [single]
    if not single.is_file():
        if not index.is_file():
            if not any(found for pattern in OTHERS for found in folder.glob(pattern)):
                raise ConfigError(
                    f"{key}: {path} has no weights: no {SINGLE} and no {INDEX}; fetch or copy them"
                )
            return
        names = _named_by(key, index)
        files = [folder / name for name in names]
        if missing := [file.name for file in files if not file.is_file()]:
            raise ConfigError(
                f"{key}: {path} lacks {len(missing)} of the {len(files)} files that {INDEX} names, "
                f"e.g. {missing[0]}; fetch or copy them"
            )
    for file in files:
        try:
            read_header(file)
        except ValueError as error:
            raise ConfigError(f"{key}: {file} {error}") from None
        except OSError as error:
            raise ConfigError(f"{key}: {file} cannot be read ({error.strerror})") from None


def _named_by(key: str, index: Path) -> list[str]:
    """Return the names of the files with weights that an index names."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {index}: expected JSON, {error}; fetch it again") from None
    names = content.get("weight_map") if isinstance(content, Mapping) else None
    if not isinstance(names, Mapping) or not names or not all(map(_is_text, names.values())):
        raise ConfigError(
            f"{key}: {index}: expected a `weight_map` with the file of each tensor; fetch it again"
        )
    return sorted(set(names.values()))


def _is_text(value: object) -> bool:
    return isinstance(value, str)
