"""Loading of Hugging Face folders into models.

Tensors are read one after the other; a rank reads only tensors of which it holds a shard.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from mcore_adapter.convert.arrays import A, join, zeros
from mcore_adapter.convert.conversion_plan import HfRef, Task, check_coverage, present, tasks
from mcore_adapter.convert.fused_experts import table_as_stored
from mcore_adapter.convert.shapes import check_shapes
from mcore_adapter.convert.storage.json_file import read_json
from mcore_adapter.convert.storage.tensor_file import Piece, read_header
from mcore_adapter.convert.storage.weight_files import INDEX, SINGLE, weights_of
from mcore_adapter.convert.table import ModelTable
from mcore_adapter.errors import ConversionError
from mcore_adapter.local_tensors import Held, Ranks, held_tensors
from mcore_adapter.models import table_of
from mcore_adapter.models.config import Config, completed
from mcore_adapter.models.scores import ScoreHead, with_head
from mcore_adapter.parallel_sizes import ParallelSizes

_PASSED_BYTES = 2**26
"""Bytes of tensors after which malloc is asked to return what is free."""


def read_config(folder: Path, replaced: Mapping[str, Any] | None = None) -> Config:
    """Read the `config.json` of a folder and complete it with defaults.

    Args:
        replaced: values to take in place of those in the file; those of a nested section are merged
            with the section, but `rope_parameters` are whole.

    Raises:
        ConversionError: there is no `config.json`, or it is not JSON.
        ConfigError: a key has a value of the wrong type or out of range.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConversionError(f"{folder} has no config.json; expected a Hugging Face model folder")
    return completed(_with(read_json(path), replaced or {}))


def _with(values: Mapping[str, Any], replaced: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config with others in their place."""
    found = dict(values)
    for key, value in replaced.items():
        inner = values.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping) and key != "rope_parameters":
            found[key] = _with(inner, value)
        else:
            found[key] = value
    if "rope_parameters" in replaced:
        found.pop("rope_scaling", None)  # the older name of the same
    return found


def table_in(folder: Path, head: ScoreHead | None = None) -> ModelTable:
    """Return the table of the model in a Hugging Face folder, with the names and formats there.

    Args:
        head: head in place of the output layer; None: the model keeps its output layer.

    Raises:
        ConversionError: the folder has no usable config or weights.
        ConfigError: a key of its `config.json` is missing, or has an impossible value.
        UnknownModelError: there is no family for its `model_type`.
    """
    with HfTensors(folder) as tensors:
        table = table_of(read_config(folder))
        if head is not None:
            new = not head.stored and not tensors.names.issuperset(head.names)
            table = with_head(table, head, new=new)
        return table_as_stored(table, tensors.shapes)


def load(
    folder: Path,
    chunks: Sequence[nn.Module],
    table: ModelTable,
    sizes: ParallelSizes,
    ranks: Ranks | None = None,
) -> None:
    """Fill this rank's chunks with the weights of a Hugging Face folder.

    Not a collective: every rank reads for itself.

    Raises:
        ConversionError: folder, table and model do not have the same tensors or shapes.
    """
    ranks = ranks or Ranks.of_this_process()
    passed = 0
    with torch.no_grad():
        for held, shard in shards(
            folder, held_tensors(chunks, table, sizes, ranks), table, sizes, ranks
        ):
            held.tensor.copy_(shard)
            passed += shard.nbytes
            if passed > _PASSED_BYTES:
                _return_freed()
                passed = 0


def _return_freed() -> None:
    """Let malloc return free memory to the system: what merged tensors leave between those of the
    model would be as much as the model in the end. Does nothing where malloc is not glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def shards(
    folder: Path,
    targets: Iterable[Held],
    table: ModelTable,
    sizes: ParallelSizes,
    ranks: Ranks,
) -> Iterator[tuple[Held, Tensor]]:
    """Yield each target with its shard from a folder, one at a time and in the dtype of the folder.

    Raises:
        ConversionError: folder, table and model do not have the same tensors or shapes.
    """
    with HfTensors(folder) as tensors:
        table = table_as_stored(table, tensors.shapes)
        planned = tasks(table, sizes)
        check_coverage(planned, tensors.names, table)
        check_shapes(present(planned, tensors.names), tensors.shapes, table)
        stored = {task.name: task for task in planned}
        for held in targets:
            task = stored.get(held.task.name, held.task)
            if task.param.optional and task.hf[0].name not in tensors.names:
                raise ConversionError(
                    f"{folder} has no {task.hf[0].name}: its layers that predict further tokens "
                    "were left out; build the model without (mtp)"
                )
            full = _full(task, tensors, table)
            shard = shard_of(full, task, sizes, ranks)
            if shard.shape != held.tensor.shape:
                raise ConversionError(
                    f"{task.name}: the model has shape {list(held.tensor.shape)}, the checkpoint "
                    f"gives {list(shard.shape)} for shard {ranks.shard_of(task)} of "
                    f"{task.shards(sizes)}"
                )
            yield held, shard


def _full(task: Task, tensors: HfTensors, table: ModelTable) -> Tensor:
    """Return the full Megatron tensor of a task: read from a folder, or zero if it is new."""
    if task.param.new:
        parts = [torch.zeros(shape) for shape in task.param.shapes]
    else:
        parts = [tensors.read(ref) for ref in task.hf]
    return task.param.op.to_mcore(parts, table.shape)


def shard_of(full: A, task: Task, sizes: ParallelSizes, ranks: Ranks) -> A:
    """Cut this rank's shard out of a full tensor, after padding its vocabulary with zero rows."""
    count = task.shards(sizes)
    missing = -full.shape[0] % count if task.param.pads_vocab else 0
    if missing:
        full = join([full, zeros(full, (missing, *full.shape[1:]))])
    return task.param.shard.split(full, count)[ranks.shard_of(task)]


class HfTensors:
    """The tensors of a Hugging Face folder, by name."""

    def __init__(self, folder: Path) -> None:
        """Read the headers of the safetensors files in `folder`.

        Raises:
            ConversionError: the folder has no safetensors files, or they are incomplete.
        """
        self._pieces = _pieces(folder)
        self._open: dict[Path, Any] = {}

    @property
    def names(self) -> set[str]:
        return set(self._pieces)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: piece.spec.shape for name, piece in self._pieces.items()}

    def read(self, ref: HfRef) -> Tensor:
        """Read a tensor, or one expert's part of it."""
        path = self._pieces[ref.name].path
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


def _pieces(folder: Path) -> dict[str, Piece]:
    """Return the place of each tensor in the files of a folder.

    In a Hugging Face checkpoint, the files that its index names are read; in any other folder, such
    as an adapter's, all safetensors files.

    Raises:
        ConversionError: there are no safetensors files, or they are incomplete.
    """
    if any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return weights_of(folder)[0]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConversionError(f"{folder} has no .safetensors files")
    return {name: piece for path in files for name, piece in read_header(path).items()}
