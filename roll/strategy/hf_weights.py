"""The safetensors files of a Hugging Face folder, written tensor by tensor.

The library of safetensors writes a file whose tensors are all in memory. Here the places of the
tensors are known before their values, so each is written as soon as it has been gathered.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from roll.models.deferred.files import DTYPES
from roll.weight_sync.manifest import TensorMeta

MAX_FILE_BYTES = 5_000_000_000
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNED_BYTES = 8
_UNFINISHED = ".part"
"""End of the name of a file while tensors are missing: it would load, with zeros in their place."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a tensor in its file."""

    path: Path
    begin: int
    """Offset of its first byte."""
    meta: TensorMeta

    def write(self, tensor: Tensor) -> None:
        """Write the values of the tensor."""
        assert tuple(tensor.shape) == self.meta.shape, self.meta
        assert tensor.dtype == self.meta.torch_dtype, self.meta
        values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        with self.path.open("r+b") as file:
            file.seek(self.begin)
            file.write(values.numpy().data)


def write_weights(
    folder: Path,
    metas: Sequence[TensorMeta],
    weights: Iterable[tuple[str, Tensor]],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write tensors to safetensors files in a folder, with an index if there are several files.

    Args:
        folder: existing folder without safetensors files.
        metas: names, shapes and dtypes of the tensors.
        weights: names and values of the same tensors, in any order.
        max_file_bytes: largest size of the tensors of one file; a larger tensor has its own file.

    Raises:
        KeyError: `weights` has a tensor that `metas` does not have, or one twice.
        ValueError: `weights` lacks a tensor.
        OSError: the disk is full.
    """
    files = _divided(metas, max_file_bytes)
    places = {
        place.meta.name: place
        for name, held in files.items()
        for place in _create(folder / f"{name}{_UNFINISHED}", held)
    }
    for name, tensor in weights:
        places.pop(name).write(tensor)
    if places:
        raise ValueError(f"{next(iter(places))} was announced and did not come")
    for name in files:
        (folder / f"{name}{_UNFINISHED}").replace(folder / name)
    if len(files) > 1:
        told = {meta.name: name for name, held in files.items() for meta in held}
        size = {"total_size": sum(meta.num_bytes for meta in metas)}
        index = {"metadata": size, "weight_map": told}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _divided(metas: Sequence[TensorMeta], most: int) -> dict[str, list[TensorMeta]]:
    """Distribute tensors over files, in order; return those of each file, by its name."""
    groups: list[list[TensorMeta]] = [[]]
    used = 0
    for meta in metas:
        if groups[-1] and used + meta.num_bytes > most:
            groups.append([])
            used = 0
        groups[-1].append(meta)
        used += meta.num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": group
        for number, group in enumerate(groups, 1)
    }


def _create(path: Path, metas: list[TensorMeta]) -> Iterator[_Place]:
    """Write the header of a file and leave room for its tensors; yield their places.

    Wide dtypes come first, so that each tensor is aligned, as the library of safetensors does it.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ordered = sorted(metas, key=lambda meta: -meta.torch_dtype.itemsize)
    begins, at = [], 0
    for meta in ordered:
        begins.append(at)
        at += meta.num_bytes
        header[meta.name] = {
            "dtype": _NAMES[meta.torch_dtype],
            "shape": list(meta.shape),
            "data_offsets": [begins[-1], at],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNED_BYTES)
    first = 8 + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(first + at)
    for meta, begin in zip(ordered, begins, strict=True):
        yield _Place(path, first + begin, meta)
