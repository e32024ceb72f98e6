"""The files of a checkpoint: one per rank, with the rank's pieces of master weights and moments.

The files are in safetensors format and are written and read tensor by tensor. The metadata holds
the offset of each piece in its parameter. Hence a rank can load the elements it needs from any
file, and the number of ranks and the ZeRO stage may change between saving and loading.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from roll.core.errors import CheckpointError
from roll.strategy.deepspeed.shard_map import MASTER, Piece

_ITEM = 4
"""Size of a float32 in bytes."""


def write(path: Path, held: Sequence[Piece], kinds: Sequence[str]) -> None:
    """Write the file of this rank, with these kinds of tensors of its pieces. If writing fails, no
    file with the name `path` appears."""
    header: dict[str, Any] = {
        "__metadata__": {"first": json.dumps({piece.name: piece.first for piece in held})}
    }
    end = 0
    for piece in held:
        for kind in kinds:
            begin, end = end, end + piece.num_elements * _ITEM
            header[_key(piece.name, kind)] = {
                "dtype": "F32",
                "shape": [piece.num_elements],
                "data_offsets": [begin, end],
            }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    draft = path.with_suffix(".part")
    with draft.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for piece in held:
            for kind in kinds:
                stream.write(piece.tensors[kind].detach().cpu().contiguous().numpy().data)
    draft.replace(path)


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"shard_{rank:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class _Source:
    """A piece of a parameter, in one of the open files of a checkpoint."""

    first: int
    count: int
    file: Any


class Shards:
    """Reader of the files of all ranks that wrote a checkpoint; a context manager.

    Args:
        ranks: number of ranks that wrote the checkpoint.

    Raises:
        CheckpointError: a file is missing or damaged.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder = folder
        self._open = ExitStack()
        self._sources: dict[str, list[_Source]] = {}
        for rank in range(ranks):
            self._add(file_of(folder, rank))

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def check(self, name: str, num_elements: int) -> None:
        """Raise an error unless the files together contain all elements of a parameter.

        Raises:
            CheckpointError: the number of elements in the files is not `num_elements`.
        """
        found = sum(source.count for source in self._sources.get(name, ()))
        if found != num_elements:
            raise CheckpointError(
                f"checkpoint {self._folder} is incomplete: its files have {found} of the "
                f"{num_elements} elements of {name!r}"
            )

    def fill(self, piece: Piece, kinds: Sequence[str]) -> None:
        """Fill these kinds of tensors of a piece with the saved values of the same elements; call
        `check` before."""
        end = piece.first + piece.num_elements
        for source in self._sources[piece.name]:
            low, high = max(piece.first, source.first), min(end, source.first + source.count)
            if low < high:
                for kind in kinds:
                    saved = source.file.get_slice(_key(piece.name, kind))
                    part: Tensor = saved[low - source.first : high - source.first]
                    piece.tensors[kind][low - piece.first : high - piece.first].copy_(part)

    def _add(self, path: Path) -> None:
        """Open one rank's file and list its pieces; CheckpointError: it is missing or damaged."""
        try:
            file = self._open.enter_context(safe_open(path, framework="pt"))
            firsts: dict[str, int] = json.loads(file.metadata()["first"])
            sizes = {name: file.get_slice(_key(name, MASTER)).get_shape()[0] for name in firsts}
        except FileNotFoundError as error:
            raise CheckpointError(
                f"no complete checkpoint in {path.parent}: {path} is missing"
            ) from error
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}") from error
        for name, first in firsts.items():
            self._sources.setdefault(name, []).append(_Source(first, sizes[name], file))


def _key(name: str, kind: str) -> str:
    return f"{name}.{kind}"
