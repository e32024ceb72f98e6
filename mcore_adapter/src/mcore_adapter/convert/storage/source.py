"""Source of a conversion: the place of each tensor of a model, found from file headers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from mcore_adapter.convert.conversion_plan import (
    HfRef,
    Task,
    check_coverage,
    check_layout,
    is_dropped,
    present,
    tasks,
)
from mcore_adapter.convert.run_conversion import EqualPair, HfSide, McoreSide
from mcore_adapter.convert.shapes import FullShapes, check_shapes
from mcore_adapter.convert.shards import Replicated
from mcore_adapter.convert.storage.folders import (
    META,
    HfFolder,
    McoreFolder,
    dense_file,
    expert_file,
)
from mcore_adapter.convert.storage.tensor_file import Piece, Spec
from mcore_adapter.convert.table import ModelTable
from mcore_adapter.errors import ConversionError
from mcore_adapter.parallel_sizes import ParallelSizes, padded_vocab


@dataclass(frozen=True)
class FullTensor:
    """Full Megatron tensor of a source."""

    task: Task
    side: HfSide | McoreSide
    """Places of the tensors or shards that the full tensor is made from."""
    spec: Spec
    """Data type and shape of the full tensor without padding."""


@dataclass(frozen=True)
class Source:
    """Model or adapter that a conversion starts from."""

    folder: HfFolder | McoreFolder
    table: ModelTable
    plan: Callable[[ParallelSizes], list[Task]]
    """Function that lists the tasks of the model or adapter for given parallel sizes."""
    tensors: Mapping[str, FullTensor]
    """All full tensors by Megatron name, without copies (see `Param.copy_of`)."""
    checks: tuple[EqualPair, ...] = ()
    """Pairs of tensors that must be equal."""
    repeats: tuple[str, ...] = ()
    """Repeated tensors that the original checkpoint stored, see `ModelTable.repeats`."""
    adapter: Mapping[str, Any] | None = None
    """Factors of an adapter, see `convert.lora.factors_to_json`; None: the source is a model."""
    notes: tuple[str, ...] = ()
    """Notes for the user: tensors that are left out, and which of two files was chosen."""

    def full(self, task: Task) -> FullTensor:
        """Return the full tensor of a task; for a copy, the tensor of its original."""
        found = self.tensors[task.param.copy_of or task.name]
        return FullTensor(task, found.side, found.spec)


def source_of(
    folder: HfFolder | McoreFolder,
    table: ModelTable,
    plan: Callable[[ParallelSizes], list[Task]] | None = None,
) -> Source:
    """Find every tensor of a model or an adapter.

    Args:
        plan: function that lists the tasks for given parallel sizes. Default: all rows of the
            table.

    Raises:
        ConversionError: tensors are missing, unmapped, or of a wrong shape or type.
        LayoutError: a Megatron layout has sizes that the model does not divide over.
    """
    everything = plan or (lambda sizes: tasks(table, sizes))
    if isinstance(folder, HfFolder):
        return _hf_source(folder, table, everything)
    return _mcore_source(folder, table, everything)


def _hf_source(
    folder: HfFolder, table: ModelTable, plan: Callable[[ParallelSizes], list[Task]]
) -> Source:
    """Find the tensors of a Hugging Face folder; raise ConversionError unless they fit the
    table."""
    have = folder.tensors
    whole = plan(ParallelSizes())
    check_coverage(whole, have, table)
    planned = present(whole, have)
    specs = {name: piece.spec.shape for name, piece in have.items()}
    check_shapes(planned, specs, table)
    names, found = {task.name for task in planned}, {}
    full_shape = FullShapes(table)
    for task in planned:
        pieces = pieces_of(task.hf, have)
        dtypes = {piece.spec.dtype for piece in pieces}
        if len(dtypes) > 1:
            refs = ", ".join(ref.name for ref in task.hf)
            raise ConversionError(f"{refs} become one tensor but are of types {sorted(dtypes)}")
        found[task.name] = FullTensor(task, HfSide(pieces), Spec(dtypes.pop(), full_shape(task)))
    repeats = tuple(name for name in table.repeats if name in have)
    for name in repeats:
        _check_repeat(name, table.repeats[name], have)
    return Source(
        folder=folder,
        table=table,
        plan=lambda sizes: [t for t in plan(sizes) if (t.param.copy_of or t.name) in names],
        tensors=found,
        checks=tuple(
            EqualPair(have[name], have[table.repeats[name]], (name, table.repeats[name]))
            for name in repeats
        ),
        repeats=repeats,
        notes=(*folder.notes, *_dropped(have, table)),
    )


def _check_repeat(name: str, of: str, have: Mapping[str, Piece]) -> None:
    """Raise ConversionError unless the repetition `name` and its original `of` have one type and
    one shape."""
    one, other = have[name].spec, have[of].spec
    if one != other:
        raise ConversionError(
            f"{name} is {one.dtype} {list(one.shape)} and {of}, which it repeats, {other.dtype} "
            f"{list(other.shape)}; Megatron has them as one"
        )


def _dropped(have: Mapping[str, Piece], table: ModelTable) -> tuple[str, ...]:
    """Return a note that names a tensor that is left out; no note if there are none."""
    names = [name for name in have if is_dropped(name, table)]
    if not names:
        return ()
    many = f" and {len(names) - 1} more like it" if len(names) > 1 else ""
    return (f"left out {names[0]}{many}: a buffer that models compute themselves",)


def _mcore_source(
    folder: McoreFolder, table: ModelTable, plan: Callable[[ParallelSizes], list[Task]]
) -> Source:
    """Find the tensors of a Megatron folder.

    Raises:
        ConversionError: a tensor is missing, does not fit, or is not in the table.
        LayoutError: the model does not divide over the sizes of the folder.
    """
    sizes, found = folder.sizes, dict[str, FullTensor]()
    _check_meta(folder, table)
    check_layout(table, sizes)
    planned = present(plan(sizes), folder.names)
    full_shape, expected = FullShapes(table), set()
    checks: list[EqualPair] = []
    for task in planned:
        full = _full_tensor(task, folder, table, full_shape)
        pieces = full.side.pieces
        expected |= {(piece.path.name, task.name) for piece in pieces}
        if isinstance(task.param.shard, Replicated):
            checks += [_same_on_ranks(task.name, pieces[0], other) for other in pieces[1:]]
        if task.param.copy_of is not None:
            originals = found[task.param.copy_of].side.pieces
            checks += map(_same_on_ranks, repeat(task.name), originals, pieces)
        else:
            found[task.name] = full
    extra = sorted({(f, name) for f, held in folder.files.items() for name in held} - expected)
    if extra:
        file, name = extra[0]
        raise ConversionError(
            f"{folder.path / file} has {name}, which the table of {table.model_type} has no row for"
        )
    names = {task.name for task in planned}
    return Source(
        folder=folder,
        table=table,
        plan=lambda sizes: [t for t in plan(sizes) if (t.param.copy_of or t.name) in names],
        tensors=found,
        checks=tuple(checks),
        repeats=folder.repeats,
        adapter=folder.adapter,
    )


def _check_meta(folder: McoreFolder, table: ModelTable) -> None:
    """Raise `ConversionError` unless `mcore.json` agrees with `config.json`."""
    if folder.vocab not in (None, table.shape.vocab):
        raise ConversionError(
            f"{folder.path / META} has a vocabulary of {folder.vocab}, config.json says "
            f"{table.shape.vocab}"
        )
    strange = [name for name in folder.repeats if name not in table.repeats]
    if strange:
        raise ConversionError(
            f"{folder.path / META} repeats {strange[0]}, which no {table.model_type} does"
        )


def _full_tensor(
    task: Task, folder: McoreFolder, table: ModelTable, full_shape: FullShapes
) -> FullTensor:
    """Find the shards of a tensor.

    Raises:
        ConversionError: a shard is missing, or differs from the others in type or from the table in
            shape.
    """
    files = files_of(task, folder.sizes, table)
    lost = [file for file in files if task.name not in folder.files.get(file, {})]
    if lost:
        raise ConversionError(f"{folder.path / lost[0]} lacks {task.name}; convert it again")
    shape = full_shape(task)
    padded = padded_shape(shape, task, folder.sizes)
    each = task.param.shard.shard_shape(padded, len(files), task.name)
    pieces = tuple(folder.files[file][task.name] for file in files)
    dtype = pieces[0].spec.dtype
    for piece in pieces:
        if piece.spec != Spec(dtype, each):
            raise ConversionError(
                f"{piece.path} has {task.name} as {piece.spec.dtype} {list(piece.spec.shape)}, "
                f"expected {dtype} {list(each)} of config.json and {META}; convert it again"
            )
    rows = padded[0] if padded else 1
    return FullTensor(task, McoreSide(pieces, rows), Spec(dtype, shape))


def _same_on_ranks(name: str, one: Piece, other: Piece) -> EqualPair:
    """Return the check that two ranks hold the same tensor, of which only `one` is converted."""
    return EqualPair(one, other, (f"{other.path}: {name}", f"that in {one.path}"))


def padded_shape(shape: tuple[int, ...], task: Task, sizes: ParallelSizes) -> tuple[int, ...]:
    """Return the shape of a full tensor with its vocabulary padded to divide over the ranks.

    A tensor without a vocabulary dimension keeps its shape.
    """
    if not task.param.pads_vocab:
        return shape
    return (padded_vocab(shape[0], task.shards(sizes)), *shape[1:])


def files_of(task: Task, sizes: ParallelSizes, table: ModelTable) -> list[str]:
    """Return the names of the files with the shards of a tensor, in order of tensor parallel ranks.

    A tensor that all ranks hold is in every one of these files.
    """
    stage, expert_rank = task.stage(sizes, table), task.expert_rank(sizes, table)
    ranks = range(task.shards(sizes))
    if expert_rank is None:
        return [dense_file(stage, rank) for rank in ranks]
    return [expert_file(stage, expert_rank, rank) for rank in ranks]


def pieces_of(refs: Iterable[HfRef], where: Mapping[str, Piece]) -> tuple[Piece, ...]:
    """Return the place of each referenced tensor or part, given the places of whole tensors."""
    return tuple(
        where[ref.name] if ref.index is None else where[ref.name].part(ref.index) for ref in refs
    )
