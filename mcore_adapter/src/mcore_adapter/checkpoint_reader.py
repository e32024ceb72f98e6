"""Reader of checkpoints on disk, which returns full tensors whatever layout wrote them.

No model is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mcore_adapter.convert.arrays import A, Outline
from mcore_adapter.convert.conversion_plan import Task, tasks
from mcore_adapter.convert.shards import Replicated
from mcore_adapter.convert.storage.json_file import read_json
from mcore_adapter.convert.storage.tensor_file import read_header
from mcore_adapter.convert.table import ModelTable
from mcore_adapter.errors import ConversionError, McoreAdapterError
from mcore_adapter.parallel_sizes import ParallelSizes

INDEX = "index.json"
WEIGHT = "weight"


def key_of(task: Task, kind: str, shard: int) -> str:
    """Return the name of a shard in the files; `kind` is `weight` or one of Adam's moments."""
    return f"{task.name}#{kind}#{shard}"


@dataclass(frozen=True, slots=True)
class _SavedShard:
    """Shape of a shard, and the files that hold its parts."""

    shape: tuple[int, ...]
    parts: tuple[int, ...]
    """Ranks whose files hold parts of the shard, in the order of the parts."""


class Saved:
    """A checkpoint that `checkpoint.save` wrote.

    The headers of all files are checked before the first tensor is read.
    """

    def __init__(self, folder: Path, table: ModelTable) -> None:
        """Open the checkpoint in `folder`.

        Raises:
            ConversionError: a file is missing or damaged; the message says which.
        """
        self._folder, self._table = folder, table
        path = folder / INDEX
        if not path.is_file():
            raise ConversionError(f"{path} is missing: it is no complete checkpoint")
        try:
            index = read_json(path)
            layers = index["sizes"]["layers"]
            sizes = {**index["sizes"], "layers": None if layers is None else tuple(layers)}
            for size in [*(layers or ()), *(v for k, v in sizes.items() if k != "layers")]:
                if size is not None:  # as `etp` may be
                    _count(size)
            self._saved_sizes = ParallelSizes(**sizes)
            self._tensors = {key: _place(found) for key, found in index["tensors"].items()}
            self.step = _count(index["step"])
            """Number of steps that Adam has made."""
            self.extra: dict[str, Any] = dict(index["extra"])
        except McoreAdapterError as error:
            raise ConversionError(f"{path} is damaged: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConversionError(f"{path} is damaged: {error!r}") from error
        self._files = self._open_files()

    def full(self, task: Task, kind: str) -> Tensor:
        """Return a tensor as in the whole model, without padding of the vocabulary.

        Args:
            kind: `weight` or one of Adam's moments, see `key_of`.

        Raises:
            ConversionError: the checkpoint lacks the tensor.
        """
        shards = [self._read(key) for key in self._keys(task, kind)]
        return self._merged(task, shards)

    def outline(self, task: Task, kind: str) -> Outline:
        """Return the shape that `full` would return, without reading the tensor.

        Args:
            kind: `weight` or one of Adam's moments, see `key_of`.

        Raises:
            ConversionError: the checkpoint lacks the tensor.
        """
        keys = self._keys(task, kind)
        return self._merged(task, [Outline(self._tensors[key].shape) for key in keys])

    def _open_files(self) -> dict[int, Any]:
        """Check the headers of all files, and return the open files by rank.

        Raises:
            ConversionError: a file is missing, or the files do not hold all parts of a tensor.
        """
        headers, files = {}, {}
        for rank in {rank for found in self._tensors.values() for rank in found.parts}:
            path = self._folder / f"rank{rank:05d}.safetensors"
            if not path.is_file():
                raise ConversionError(f"{path} is missing: the checkpoint is not complete")
            headers[rank], files[rank] = read_header(path), safe_open(path, "pt")
        for key, found in self._tensors.items():
            parts = [headers[rank].get(key) for rank in found.parts]
            if sum(prod(part.spec.shape) for part in parts if part) != prod(found.shape):
                raise ConversionError(
                    f"{self._folder} has not all of {key}: its files are not of one checkpoint"
                )
        return files

    def _keys(self, task: Task, kind: str) -> list[str]:
        """Return the keys of all shards of a tensor of the given kind (see `key_of`), in the order
        of the ranks; raise ConversionError if one is absent."""
        if task.param.copy_of is not None and self._saved_sizes.pp == 1:
            # A layout with one stage has no copies for other stages: read the original.
            task = next(
                t for t in tasks(self._table, self._saved_sizes) if t.name == task.param.copy_of
            )
        count = 1 if isinstance(task.param.shard, Replicated) else task.shards(self._saved_sizes)
        keys = [key_of(task, kind, shard) for shard in range(count)]
        absent = [key for key in keys if key not in self._tensors]
        if absent:
            raise ConversionError(f"{self._folder} lacks {absent[0]}: it is of another model")
        return keys

    def _merged(self, task: Task, shards: list[A]) -> A:
        """Return the full tensor that shards make, without padding of the vocabulary."""
        full = task.param.shard.merge(shards)
        return full[: self._table.shape.vocab] if task.param.pads_vocab else full

    def _read(self, key: str) -> Tensor:
        """Read a shard, whose parts may lie in several files."""
        found = self._tensors[key]
        parts = [self._files[rank].get_tensor(key) for rank in found.parts]
        flat: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return flat.view(found.shape)


def _place(found: Any) -> _SavedShard:
    """Parse the entry of a shard in the index; raise KeyError, TypeError or ValueError if wrong."""
    return _SavedShard(*(tuple(_count(each) for each in found[key]) for key in ("shape", "parts")))


def _count(value: Any) -> int:
    """Return the value; raise ValueError unless it is a whole number from 0 on."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number of things")
    return value
