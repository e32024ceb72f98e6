"""The files of a sharded checkpoint: files with tensors, and a JSON index of their contents.

`torch.distributed.checkpoint` plans which rank writes and reads which part. The index of
`torch.distributed.checkpoint` is a pickle, which can run code when it is loaded. The reader and the
writer in this module therefore use a JSON index in its place.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from roll.core.errors import CheckpointError

INDEX = "index.json"


class IndexedWriter(FileSystemWriter):
    """Writer of tensors in PyTorch's format with a JSON index.

    `torch.distributed.checkpoint` only plans with it, together with the other ranks. `write` and
    `write_index` then do the work without them, so they may run in a thread.
    """

    def __init__(self, folder: Path, *, copied: bool) -> None:
        """Write into `folder`.

        Args:
            copied: all tensors are in the memory of the machine; a thread that writes them then
                leaves the GPU alone.
        """
        super().__init__(folder)
        if copied:
            self.per_thread_copy_ahead = 0
        self._folder = folder
        self._planned: tuple[SavePlan, SavePlanner] | None = None
        self._metadata: Metadata | None = None
        """Outlines of all tensors, on rank 0."""
        self._ranks = range(dist.get_world_size())
        self._rank = dist.get_rank()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Keep the plan of this rank, and write nothing yet."""
        self._planned = plan, planner
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keep the outlines of all tensors. One rank calls this."""
        self._metadata = metadata

    def write(self) -> None:
        """Write the tensors of this rank, and a list of their places for `write_index`."""
        assert self._planned is not None, "nothing is planned"
        results = super().write_data(*self._planned).value()
        places = [
            [
                result.index.fqn,
                list(result.index.offset or ()),
                {
                    "file": result.storage_data.relative_path,
                    "begin": result.storage_data.offset,
                    "bytes": result.storage_data.length,
                },
            ]
            for result in results
        ]
        self._places_of(self._rank).write_text(json.dumps(places), encoding="utf-8")

    def write_index(self) -> None:
        """Write the index. Rank 0 calls this after all ranks have written."""
        assert self._metadata is not None, "only rank 0 knows all tensors"
        lists = [self._places_of(rank) for rank in self._ranks]
        places = {
            (name, tuple(offsets)): place
            for file in lists
            for name, offsets, place in json.loads(file.read_text(encoding="utf-8"))
        }
        tensors = {}
        for name, known in self._metadata.state_dict_metadata.items():
            assert isinstance(known, TensorStorageMetadata), f"{name} is no tensor"
            chunks = [
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    **places[name, tuple(chunk.offsets)],
                }
                for chunk in known.chunks
            ]
            dtype = str(known.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(known.size), "chunks": chunks}
        aside = self._folder / f".{INDEX}"
        with aside.open("w", encoding="utf-8") as file:
            json.dump({"tensors": tensors}, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._folder / INDEX)
        for each in lists:
            each.unlink()

    def _places_of(self, rank: int) -> Path:
        """Return the path of a rank's list of places."""
        return self._folder / f".places_{rank:05d}.json"


class IndexedReader(FileSystemReader):
    """Reader of the files of `IndexedWriter`. PyTorch unpickles nothing but the tensors in them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def check_files(self) -> None:
        """Read the index, and look for every file that it names, before anything is loaded.

        Raises:
            CheckpointError: the index is missing or damaged, or a file is missing.
        """
        places = self.read_metadata().storage_data or {}
        for name in sorted({place.relative_path for place in places.values()}):
            if not (self._folder / name).is_file():
                raise CheckpointError(
                    f"no complete checkpoint in {self._folder}: {self._folder / name} is missing"
                )

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the JSON index.

        Raises:
            CheckpointError: the index is missing or damaged.
        """
        path = self._folder / INDEX
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            tensors: dict[str, Any] = {}
            places: dict[MetadataIndex, Any] = {}
            for name, known in index["tensors"].items():
                tensors[name] = _outline(known)
                for chunk in known["chunks"]:
                    places[MetadataIndex(name, chunk["offsets"])] = _place(chunk)
        except FileNotFoundError:
            raise CheckpointError(
                f"no complete checkpoint in {self._folder}: {path} is missing"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        return Metadata(
            state_dict_metadata=tensors,
            storage_data=places,
            storage_meta=StorageMeta(load_id=self.load_id),
        )


def _outline(known: dict[str, Any]) -> TensorStorageMetadata:
    """Return torch's metadata of a tensor from its index entry; ValueError: unknown dtype."""
    dtype = getattr(torch, known["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype is called {known['dtype']!r}")
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"]))
        for chunk in known["chunks"]
    ]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(known["shape"]), chunks)


def _place(chunk: dict[str, Any]) -> Any:
    """Return torch's record of the place of a chunk; ValueError: its file is in another folder."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    file, begin, length = chunk["file"], chunk["begin"], chunk["bytes"]
    if Path(file).name != file:
        raise ValueError(f"{file!r} is not the name of a file beside it")
    return _StorageInfo(file, int(begin), int(length))
