"""Choice of the safetensors files that hold the weights of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from mcore_adapter.convert.storage.json_file import read_json
from mcore_adapter.convert.storage.tensor_file import Piece, read_header
from mcore_adapter.errors import ConversionError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def weights_of(folder: Path) -> tuple[dict[str, Piece], tuple[str, ...]]:
    """Find the place of each tensor in a Hugging Face folder.

    If the folder has both `model.safetensors` and an index, the single file is read, as Hugging
    Face does: `save_pretrained` may leave an old index behind.

    Returns:
        Place of each tensor by name, and notes for the user about the choice of files.

    Raises:
        ConversionError: files are missing or corrupt, or do not match the index.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        left = f"{SINGLE} is read, as Hugging Face does; {INDEX} beside it is not"
        return read_header(single), ((left,) if index.is_file() else ())
    if not index.is_file():
        raise ConversionError(
            f"{folder} has neither {SINGLE} nor {INDEX}; weights in other formats must be saved "
            "again with save_pretrained"
        )
    return _indexed(folder, index), ()


def _indexed(folder: Path, index: Path) -> dict[str, Piece]:
    """Map each tensor's name to its place.

    Raises:
        ConversionError: a file is missing, a tensor lies in two files, or the index and the headers
            of the files disagree.
    """
    weight_map = _weight_map(index)
    tensors: dict[str, Piece] = {}
    for name in sorted(set(weight_map.values())):
        if not (folder / name).is_file():
            raise ConversionError(f"{folder / name} is missing, and {index.name} names it")
        held = read_header(folder / name)
        twice = sorted(set(held) & set(tensors))
        if twice:
            raise ConversionError(
                f"{twice[0]} lies in {tensors[twice[0]].path.name} and in {name} of {folder}; "
                "which is right?"
            )
        tensors.update(held)
    for tensor, name in sorted(weight_map.items()):
        if tensor not in tensors:
            raise ConversionError(f"{index} promises {tensor}, which no file has")
        if tensors[tensor].path != folder / name:
            raise ConversionError(
                f"{index} says that {tensor} lies in {name}; it lies in {tensors[tensor].path.name}"
            )
    return tensors


def _weight_map(index: Path) -> Mapping[str, str]:
    """Read the index's map of tensor to file.

    Raises:
        ConversionError: there is no such map, or a file of it lies outside of the folder.
    """
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ConversionError(f"{index} has no weight_map, which names the file of each tensor")
    for tensor, name in found.items():
        if not isinstance(name, str) or not is_inside(name):
            raise ConversionError(
                f"{index} names {name!r} for {tensor}, expected a file of its folder"
            )
    return found


def is_inside(name: str) -> bool:
    """Return True if the relative path can only lead to a file in the folder or below it."""
    path = PurePosixPath(name)
    return (
        bool(path.name) and "\0" not in name and not path.is_absolute() and ".." not in path.parts
    )
