"""Where a conversion starts: which tensor of a model lies where, found from headers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_adapter.convert.arrays import Outline
from mcore_adapter.convert.engine import HfSide, McoreSide, Same
from mcore_adapter.convert.folders import HfFolder, McoreFolder, dense_file, expert_file
from mcore_adapter.convert.plan import HfRef, Task, check_coverage, present, tasks
from mcore_adapter.convert.table import ModelTable
from mcore_adapter.convert.tensorfile import Piece, Spec
from mcore_adapter.errors import ConversionError
from mcore_adapter.sizes import ParallelSizes


@dataclass(frozen=True)
class Full:
    """A full Megatron tensor without padding, and where it is found."""

    task: Task
    side: HfSide | McoreSide
    spec: Spec


@dataclass(frozen=True)
class Source:
    """All that a conversion needs to know of where it starts."""

    folder: HfFolder | McoreFolder
    table: ModelTable
    plan: Callable[[ParallelSizes], list[Task]]
    """What the model, or the adapter, consists of under given sizes."""
    tensors: Mapping[str, Full]
    """By Megatron name; copies are not among them."""
    checks: tuple[Same, ...] = ()
    repeats: tuple[str, ...] = ()
    adapter: Mapping[str, Any] | None = None
    """What to note down of an adapter."""

    def full(self, task: Task) -> Full:
        """The tensor of a task, which for a copy is that of its original."""
        found = self.tensors[task.param.copy_of or task.name]
        return Full(task, found.side, found.spec)


def source_of(
    folder: HfFolder | McoreFolder,
    table: ModelTable,
    plan: Callable[[ParallelSizes], list[Task]] | None = None,
) -> Source:
    """Finds every tensor of a model.

    Args:
        plan: what it consists of; all rows of the table by default.

    Raises:
        ConversionError: tensors are missing, unmapped or of other shapes or types.
    """
    everything = plan or (lambda sizes: tasks(table, sizes))
    if isinstance(folder, HfFolder):
        return _hf_source(folder, table, everything)
    return _mcore_source(folder, table, everything)


def _hf_source(
    folder: HfFolder, table: ModelTable, plan: Callable[[ParallelSizes], list[Task]]
) -> Source:
    have = folder.tensors
    whole = plan(ParallelSizes())
    check_coverage(whole, have, table)
    names = {task.name for task in present(whole, have)}
    found = {}
    for task in whole:
        if task.name not in names:
            continue
        pieces = pieces_of(task.hf, have)
        dtypes = {piece.spec.dtype for piece in pieces}
        if len(dtypes) > 1:
            refs = ", ".join(ref.name for ref in task.hf)
            raise ConversionError(f"{refs} become one tensor but are of types {sorted(dtypes)}")
        try:
            outlines = [Outline(piece.spec.shape) for piece in pieces]
            shape = task.param.op.to_mcore(outlines, table.shape).shape
            back = task.param.op.to_hf(Outline(shape), table.shape)
        except (ConversionError, IndexError, ValueError) as error:
            raise ConversionError(_misshapen(task, pieces)) from error
        if [part.shape for part in back] != [piece.spec.shape for piece in pieces]:
            raise ConversionError(_misshapen(task, pieces))
        found[task.name] = Full(task, HfSide(pieces), Spec(dtypes.pop(), shape))
    repeats = tuple(name for name in table.repeats if name in have)
    return Source(
        folder=folder,
        table=table,
        plan=lambda sizes: [t for t in plan(sizes) if (t.param.copy_of or t.name) in names],
        tensors=found,
        checks=tuple(
            Same(have[name], have[table.repeats[name]], (name, table.repeats[name]))
            for name in repeats
        ),
        repeats=repeats,
    )


def _misshapen(task: Task, pieces: Sequence[Piece]) -> str:
    shapes = ", ".join(
        f"{ref.name} {list(piece.spec.shape)}" for ref, piece in zip(task.hf, pieces, strict=True)
    )
    return f"shapes do not fit config.json: {shapes}"


def _mcore_source(
    folder: McoreFolder, table: ModelTable, plan: Callable[[ParallelSizes], list[Task]]
) -> Source:
    sizes, found = folder.sizes, {}
    planned = present(plan(sizes), folder.names)
    expected = set()
    for task in planned:
        files = files_of(task, sizes, table)
        expected |= {(file, task.name) for file in files}
        lost = [file for file in files if task.name not in folder.files.get(file, {})]
        if lost:
            raise ConversionError(f"{folder.path / lost[0]} lacks {task.name}; convert it again")
        if task.param.copy_of is not None:
            continue
        pieces = tuple(folder.files[file][task.name] for file in files)
        shape = task.param.shard.merge([Outline(piece.spec.shape) for piece in pieces]).shape
        rows = shape[0]
        if task.param.pads_vocab and folder.vocab is not None:
            shape = (folder.vocab, *shape[1:])
        spec = Spec(pieces[0].spec.dtype, shape)
        found[task.name] = Full(task, McoreSide(pieces, rows), spec)
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
        repeats=folder.repeats,
        adapter=folder.adapter,
    )


def files_of(task: Task, sizes: ParallelSizes, table: ModelTable) -> list[str]:
    """Where the shards of a tensor lie, by tensor parallel rank."""
    (stage,) = task.stages(sizes, table)
    expert_rank, ranks = task.expert_rank(sizes, table), range(task.shards(sizes))
    if expert_rank is None:
        return [dense_file(stage, rank) for rank in ranks]
    return [expert_file(stage, expert_rank, rank) for rank in ranks]


def pieces_of(refs: Iterable[HfRef], where: Mapping[str, Piece]) -> tuple[Piece, ...]:
    return tuple(
        where[ref.name] if ref.index is None else where[ref.name].part(ref.index) for ref in refs
    )
