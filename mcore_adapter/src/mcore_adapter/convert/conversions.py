"""Hugging Face to Megatron, back, and from one Megatron layout to another.

Each is a source, of which headers say what lies where, and a target, whose headers are written
before its tensors. What does not fit is refused before a tensor is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_adapter.convert.arrays import FLOATS, Outline
from mcore_adapter.convert.engine import (
    Delta,
    HfSide,
    Job,
    McoreSide,
    Progress,
    Same,
    create_files,
    run,
)
from mcore_adapter.convert.folders import (
    HfFolder,
    McoreFolder,
    copy_companions,
    dense_file,
    expert_file,
    write_meta,
)
from mcore_adapter.convert.output import complete_or_absent, refuse_existing
from mcore_adapter.convert.plan import Task, check_coverage, check_layout, present, tasks
from mcore_adapter.convert.table import ModelTable
from mcore_adapter.convert.tensorfile import Piece, Spec
from mcore_adapter.errors import ConversionError
from mcore_adapter.sizes import ParallelSizes, padded_vocab

MAX_SHARD_BYTES = 5_000_000_000
_PAGE_OF_META = 1 << 20


@dataclass(frozen=True)
class Settings:
    """How to convert, whatever the direction."""

    dtype: str | None = None
    """One of `arrays.FLOATS`; None: as it is."""
    workers: int | None = None
    """Processes; as many as cores by default, and one where there is little to do."""
    progress: Progress | None = None
    announce: Callable[[int], None] | None = None
    """Called once, with the number of bytes that will be written."""


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


@dataclass(frozen=True)
class Layout:
    """Which files a Megatron layout of a source has, and what is in them."""

    fulls: list[Full]
    rows: dict[str, int]
    """Length of the first dimension with padding, by Megatron name."""
    files: dict[str, dict[str, Spec]]


def layout_of(source: Source, sizes: ParallelSizes, settings: Settings) -> Layout:
    """
    Raises:
        LayoutError: the model does not divide.
    """
    check_layout(source.table, sizes)
    layout = Layout([source.full(task) for task in source.plan(sizes)], {}, {})
    for full in layout.fulls:
        spec, task = full.spec, full.task
        shape, ranks = list(spec.shape), task.shards(sizes)
        if task.param.pads_vocab:
            shape[0] = padded_vocab(shape[0], ranks)
        layout.rows[task.name] = shape[0]
        each = task.param.shard.shard_shape(shape, ranks, task.name)
        for file in _files_of(task, sizes, source.table):
            held = layout.files.setdefault(file, {})
            held[task.name] = Spec(_target_dtype(full, settings), each)
    return layout


def to_mcore(
    source: Source,
    dst: Path,
    sizes: ParallelSizes,
    settings: Settings,
    *,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Writes a Megatron layout of a Hugging Face checkpoint or of another layout.

    Args:
        finish: writes what else belongs to the folder, before it takes its name.

    Raises:
        LayoutError: the model does not divide.
        ConversionError: `dst` exists, or the disk is too small.
    """
    refuse_existing(dst)
    layout = layout_of(source, sizes, settings)
    with complete_or_absent(dst, _announced(layout.files, settings)) as folder:
        made = create_files((folder / name, specs) for name, specs in layout.files.items())
        jobs = []
        for full in layout.fulls:
            task = full.task
            pieces = tuple(
                made[folder / file][task.name] for file in _files_of(task, sizes, source.table)
            )
            jobs.append(_job(full, McoreSide(pieces, layout.rows[task.name])))
        _run(jobs, source, settings)
        copy_companions(source.folder.path, folder, settings.dtype)
        write_meta(
            folder,
            sizes,
            model_type=source.table.model_type,
            vocab=_vocab(source),
            repeats=source.repeats,
            adapter=source.adapter,
            num_tensors={name: len(specs) for name, specs in layout.files.items()},
        )
        if finish is not None:
            finish(folder)


def to_hf(
    source: Source,
    dst: Path,
    settings: Settings,
    *,
    deltas: Mapping[str, Delta] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    single: str = "model.safetensors",
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Writes Hugging Face files of a Megatron layout.

    Args:
        deltas: what to add to which tensors.
        single: the name of the file when there is one only.
        finish: writes what else belongs to the folder, before it takes its name.

    Raises:
        ConversionError: `dst` exists, the disk is too small, or a delta fits no tensor.
    """
    refuse_existing(dst)
    deltas = deltas or {}
    fulls = [source.full(task) for task in source.plan(ParallelSizes())]
    specs: dict[str, Spec] = {}
    for full in fulls:
        parts = full.task.param.op.to_hf(Outline(full.spec.shape), source.table.shape)
        for ref, part in zip(full.task.hf, parts, strict=True):
            stacked = (source.table.shape.num_experts,) if ref.index is not None else ()
            specs[ref.name] = Spec(_target_dtype(full, settings), (*stacked, *part.shape))
    for name, delta in deltas.items():
        _check_delta(name, delta, specs)
    for name in source.repeats:
        specs[name] = specs[source.table.repeats[name]]
    files = _shard(specs, max_shard_bytes, single)
    with complete_or_absent(dst, _announced(files, settings)) as folder:
        made = create_files((folder / name, held) for name, held in files.items())
        where = {name: piece for pieces in made.values() for name, piece in pieces.items()}
        jobs = []
        for full in fulls:
            refs = full.task.hf
            jobs.append(_job(full, HfSide(_pieces(refs, where), _of(refs, deltas))))
            repeated = [n for n in source.repeats if source.table.repeats[n] == refs[0].name]
            jobs += [_job(full, HfSide((where[name],), _of(refs, deltas))) for name in repeated]
        _run(jobs, source, settings)
        copy_companions(source.folder.path, folder, settings.dtype)
        if len(files) > 1:
            _write_index(folder / "model.safetensors.index.json", files)
        if finish is not None:
            finish(folder)


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
        pieces = _pieces(task.hf, have)
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
        files = _files_of(task, sizes, table)
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


def _files_of(task: Task, sizes: ParallelSizes, table: ModelTable) -> list[str]:
    """Where the shards of a tensor lie, by tensor parallel rank."""
    (stage,) = task.stages(sizes, table)
    expert_rank, ranks = task.expert_rank(sizes, table), range(task.shards(sizes))
    if expert_rank is None:
        return [dense_file(stage, rank) for rank in ranks]
    return [expert_file(stage, expert_rank, rank) for rank in ranks]


def _pieces(refs: Iterable[Any], where: Mapping[str, Piece]) -> tuple[Piece, ...]:
    return tuple(
        where[ref.name] if ref.index is None else where[ref.name].part(ref.index) for ref in refs
    )


def _of(refs: Iterable[Any], deltas: Mapping[str, Delta]) -> tuple[Delta | None, ...]:
    return tuple(deltas.get(ref.name) for ref in refs)


def _check_delta(name: str, delta: Delta, specs: Mapping[str, Spec]) -> None:
    if name not in specs:
        raise ConversionError(f"the adapter changes {name}, which the model does not have")
    product = (delta.b.spec.shape[0], delta.a.spec.shape[-1])
    if specs[name].shape != product or delta.b.spec.shape[1] != delta.a.spec.shape[0]:
        raise ConversionError(
            f"the adapter adds {list(product)} to {name}, which is {list(specs[name].shape)}; "
            "is it of another model?"
        )


def _job(full: Full, target: HfSide | McoreSide) -> Job:
    param = full.task.param
    return Job(param.op, param.shard, full.side, target, full.spec.shape[0])


def _target_dtype(full: Full, settings: Settings) -> str:
    found = full.spec.dtype
    if settings.dtype is None or full.task.param.keeps_dtype:
        return found
    return FLOATS[settings.dtype]


def _announced(files: Mapping[str, Mapping[str, Spec]], settings: Settings) -> int:
    total = sum(spec.num_bytes for specs in files.values() for spec in specs.values())
    if settings.announce is not None:
        settings.announce(total)
    return total + _PAGE_OF_META * (1 + len(files))


def _run(jobs: Sequence[Job], source: Source, settings: Settings) -> None:
    workers = settings.workers
    if workers is None:
        small = sum(job.num_bytes for job in jobs) < 64_000_000
        workers = 1 if small else (os.cpu_count() or 1)
    run(jobs, source.checks, source.table.shape, workers=workers, progress=settings.progress)


def _vocab(source: Source) -> int | None:
    if isinstance(source.folder, McoreFolder):
        return source.folder.vocab
    for full in source.tensors.values():
        if full.task.param.pads_vocab:
            return full.spec.shape[0]
    return None


def _shard(specs: Mapping[str, Spec], most: int, single: str) -> dict[str, dict[str, Spec]]:
    """Files of at most `most` bytes, or of one tensor."""
    groups: list[dict[str, Spec]] = [{}]
    used = 0
    for name, spec in specs.items():
        if groups[-1] and used + spec.num_bytes > most:
            groups.append({})
            used = 0
        groups[-1][name] = spec
        used += spec.num_bytes
    if len(groups) == 1:
        return {single: groups[0]}
    count = len(groups)
    return {
        f"model-{index:05d}-of-{count:05d}.safetensors": group
        for index, group in enumerate(groups, 1)
    }


def _write_index(path: Path, files: Mapping[str, Mapping[str, Spec]]) -> None:
    total = sum(spec.num_bytes for specs in files.values() for spec in specs.values())
    weight_map = {name: file for file, specs in files.items() for name in specs}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    path.write_text(json.dumps(content, indent=2))
