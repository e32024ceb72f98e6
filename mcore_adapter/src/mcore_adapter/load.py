"""Hugging Face folders into models: one tensor after the other, only those that this rank holds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from mcore_adapter.convert.arrays import A, join, zeros
from mcore_adapter.convert.plan import HfRef, Task, check_coverage, tasks
from mcore_adapter.convert.table import ModelTable
from mcore_adapter.errors import ConversionError
from mcore_adapter.held import Held, Ranks, held_tensors
from mcore_adapter.sizes import ParallelSizes


def read_config(folder: Path) -> dict[str, Any]:
    """
    Raises:
        ConversionError: there is no `config.json`.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConversionError(f"{folder} has no config.json; expected a Hugging Face model folder")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def load(
    folder: Path,
    chunks: Sequence[nn.Module],
    table: ModelTable,
    sizes: ParallelSizes,
    ranks: Ranks | None = None,
) -> None:
    """Fill this rank's chunks with the weights of a Hugging Face folder.

    No collectives: every rank reads for itself.

    Raises:
        ConversionError: folder, table and model do not have the same tensors or shapes.
    """
    ranks = ranks or Ranks.of_this_process()
    with torch.no_grad():
        for held, shard in shards(
            folder, held_tensors(chunks, table, sizes, ranks), table, sizes, ranks
        ):
            held.tensor.copy_(shard)


def shards(
    folder: Path,
    targets: Iterable[Held],
    table: ModelTable,
    sizes: ParallelSizes,
    ranks: Ranks,
) -> Iterator[tuple[Held, Tensor]]:
    """What a folder has for each of the targets, one at a time and in the type of the folder.

    Raises:
        ConversionError: folder, table and model do not have the same tensors or shapes.
    """
    with HfTensors(folder) as tensors:
        check_coverage(tasks(table, sizes), tensors.names, table)
        for held in targets:
            task = held.task
            if task.param.optional and task.hf[0].name not in tensors.names:
                raise ConversionError(
                    f"{folder} has no {task.hf[0].name}: its layers that predict further tokens "
                    "were left out; build the model without (mtp)"
                )
            full = task.param.op.to_mcore([tensors.read(ref) for ref in task.hf], table.shape)
            shard = shard_of(full, task, sizes, ranks)
            if shard.shape != held.tensor.shape:
                raise ConversionError(
                    f"{task.name}: the model has shape {list(held.tensor.shape)}, the checkpoint "
                    f"gives {list(shard.shape)} for shard {ranks.shard_of(task)} of "
                    f"{task.shards(sizes)}"
                )
            yield held, shard


def shard_of(full: A, task: Task, sizes: ParallelSizes, ranks: Ranks) -> A:
    """This rank's, of a full tensor whose vocabulary has no padding yet."""
    count = task.shards(sizes)
    missing = -full.shape[0] % count if task.param.pads_vocab else 0
    if missing:
        full = join([full, zeros(full, (missing, *full.shape[1:]))])
    return task.param.shard.split(full, count)[ranks.shard_of(task)]


class HfTensors:
    """The tensors of a Hugging Face folder, by name."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            ConversionError: the folder has no safetensors, or its index names absent files.
        """
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self._file_of: dict[str, Path] = {
                name: folder / file
                for name, file in json.loads(index.read_text())["weight_map"].items()
            }
            absent = sorted({path.name for path in self._file_of.values() if not path.is_file()})
            if absent:
                raise ConversionError(f"{index} names files that are not there: {absent}")
        else:
            files = sorted(folder.glob("*.safetensors"))
            if not files:
                raise ConversionError(f"{folder} has no .safetensors files")
            self._file_of = {}
            for path in files:
                with safe_open(path, framework="pt") as opened:
                    self._file_of |= dict.fromkeys(opened.keys(), path)
        self._open: dict[Path, Any] = {}

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def read(self, ref: HfRef) -> Tensor:
        path = self._file_of[ref.name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt").__enter__()
        if ref.index is not None:
            part: Tensor = self._open[path].get_slice(ref.name)[ref.index : ref.index + 1]
            return part[0]
        whole: Tensor = self._open[path].get_tensor(ref.name)
        return whole

    def __enter__(self) -> HfTensors:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for opened in self._open.values():
            opened.__exit__(kind, error, trace)
        self._open.clear()
