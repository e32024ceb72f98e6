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

from mcore_adapter.convert.arrays import FLOATS, Outline
from mcore_adapter.convert.conversion_plan import HfRef, check_layout
from mcore_adapter.convert.run_conversion import (
    Delta,
    HfSide,
    Job,
    McoreSide,
    Progress,
    create_files,
    run,
)
from mcore_adapter.convert.storage.companions import copy_companions
from mcore_adapter.convert.storage.folders import META, McoreFolder, write_meta
from mcore_adapter.convert.storage.output import complete_or_absent, refuse_existing
from mcore_adapter.convert.storage.source import Full, Source, files_of, padded_shape, pieces_of
from mcore_adapter.convert.storage.tensor_file import Spec
from mcore_adapter.errors import ConversionError
from mcore_adapter.parallel_sizes import ParallelSizes

MAX_SHARD_BYTES = 5_000_000_000
_MIN_SHARD_BYTES = 512_000_000
_SHARDS = 4
"""Files of all but small models, at least: Linux lets one process at a time write into a file."""
_PAGE_OF_META = 1 << 20


@dataclass(frozen=True)
class Settings:
    """How to convert, whatever the direction."""

    dtype: str | None = None
    """One of `arrays.FLOATS`; None: as it is."""
    workers: int | None = None
    """Processes; as many as cores by default, and one where there is little to do."""
    progress: Progress | None = None
    note: Callable[[str], None] = lambda _: None
    """Called with what a user should know: what is left out, and which of two was chosen."""
    announce: Callable[[int], None] | None = None
    """Called once, with the number of bytes that will be written."""
    flush: bool = False
    """Wait for the disk, so that a power failure takes nothing back. `cp` does not."""


@dataclass(frozen=True)
class LayoutFiles:
    """Which files a Megatron layout of a source has, and what is in them."""

    fulls: list[Full]
    rows: dict[str, int]
    """Length of the first dimension with padding, by Megatron name."""
    files: dict[str, dict[str, Spec]]


def layout_of(source: Source, sizes: ParallelSizes, settings: Settings) -> LayoutFiles:
    """
    Raises:
        LayoutError: the model does not divide.
    """
    check_layout(source.table, sizes)
    layout = LayoutFiles([source.full(task) for task in source.plan(sizes)], {}, {})
    for full in layout.fulls:
        spec, task = full.spec, full.task
        shape = padded_shape(spec.shape, task, sizes)
        layout.rows[task.name] = shape[0]
        each = task.param.shard.shard_shape(shape, task.shards(sizes), task.name)
        for file in files_of(task, sizes, source.table):
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
    _tell(source, settings)
    layout = layout_of(source, sizes, settings)
    num_bytes = _announced(layout.files, settings)
    with complete_or_absent(dst, num_bytes, flush=settings.flush) as folder:
        made = create_files((folder / name, specs) for name, specs in layout.files.items())
        jobs = []
        for full in layout.fulls:
            task = full.task
            pieces = tuple(
                made[folder / file][task.name] for file in files_of(task, sizes, source.table)
            )
            jobs.append(_job(full, McoreSide(pieces, layout.rows[task.name])))
        _run(jobs, source, settings)
        _copy_companions(source, folder, settings)
        write_meta(
            folder,
            sizes,
            model_type=source.table.model_type,
            vocab=_vocab(source),
            repeats=source.repeats,
            adapter=source.adapter,
            fused=source.table.fused,
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
    max_shard_bytes: int | None = None,
    single: str = "model.safetensors",
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Writes Hugging Face files of a Megatron layout.

    Args:
        deltas: what to add to which tensors.
        max_shard_bytes: of a file; left out, as many as let several processes write.
        single: the name of the file when there is one only.
        finish: writes what else belongs to the folder, before it takes its name.

    Raises:
        ConversionError: `dst` exists, the disk is too small, or a delta fits no tensor.
    """
    refuse_existing(dst)
    _tell(source, settings)
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
    files = split_files(specs, max_shard_bytes or shard_bytes(specs), single)
    with complete_or_absent(dst, _announced(files, settings), flush=settings.flush) as folder:
        made = create_files((folder / name, held) for name, held in files.items())
        where = {name: piece for pieces in made.values() for name, piece in pieces.items()}
        jobs = []
        for full in fulls:
            refs = full.task.hf
            jobs.append(_job(full, HfSide(pieces_of(refs, where), _of(refs, deltas))))
            repeated = [n for n in source.repeats if source.table.repeats[n] == refs[0].name]
            jobs += [_job(full, HfSide((where[name],), _of(refs, deltas))) for name in repeated]
        _run(jobs, source, settings)
        _copy_companions(source, folder, settings)
        if len(files) > 1:
            write_index(folder / "model.safetensors.index.json", files)
        if finish is not None:
            finish(folder)


def _tell(source: Source, settings: Settings) -> None:
    for note in source.notes:
        settings.note(note)


def _copy_companions(source: Source, folder: Path, settings: Settings) -> None:
    copy_companions(source.folder.path, folder, settings.dtype, without=(META,), note=settings.note)


def _of(refs: Iterable[HfRef], deltas: Mapping[str, Delta]) -> tuple[Delta | None, ...]:
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
    names = ", ".join(ref.name for ref in full.task.hf)
    return Job(names, param.op, param.shard, full.side, target, full.spec.shape[0])


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
    run(
        jobs,
        source.checks,
        source.table.shape,
        workers=workers,
        write_back=settings.flush,
        progress=settings.progress,
    )


def _vocab(source: Source) -> int | None:
    if isinstance(source.folder, McoreFolder):
        return source.folder.vocab
    for full in source.tensors.values():
        if full.task.param.pads_vocab:
            return full.spec.shape[0]
    return None


def shard_bytes(specs: Mapping[str, Spec]) -> int:
    """Of a file, by default."""
    total = sum(spec.num_bytes for spec in specs.values())
    return min(MAX_SHARD_BYTES, max(_MIN_SHARD_BYTES, total // _SHARDS))


def split_files(specs: Mapping[str, Spec], most: int, single: str) -> dict[str, dict[str, Spec]]:
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


def write_index(path: Path, files: Mapping[str, Mapping[str, Spec]]) -> None:
    total = sum(spec.num_bytes for specs in files.values() for spec in specs.values())
    weight_map = {name: file for file, specs in files.items() for name in specs}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    path.write_text(json.dumps(content, indent=2))
