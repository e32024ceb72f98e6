"""Conversions: Hugging Face to Megatron, Megatron to Hugging Face, one Megatron layout to another.

A conversion has a source and a target. The file headers of the source say where each tensor lies.
The file headers of the target are written before its tensors. If something does not fit, the
conversion raises an error before it reads a tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_adapter.convert.arrays import FLOATS, Outline
from mcore_adapter.convert.conversion_plan import check_layout
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
from mcore_adapter.convert.storage.source import (
    FullTensor,
    Source,
    files_of,
    padded_shape,
    pieces_of,
)
from mcore_adapter.convert.storage.tensor_file import Piece, Spec
from mcore_adapter.errors import ConversionError
from mcore_adapter.parallel_sizes import ParallelSizes

MAX_SHARD_BYTES = 5_000_000_000
"""Upper bound of the default size of one Hugging Face file, in bytes."""
_MIN_SHARD_BYTES = 512_000_000
"""Lower bound of the default size of one Hugging Face file, in bytes."""
_SHARDS = 4
"""Minimum number of files of a model, except a small one. With several files several processes can
write at once: Linux lets only one process at a time write into a file."""
_PAGE_OF_META = 1 << 20
"""Bytes of disk space reserved for the header of each file, and once more for the other files."""


@dataclass(frozen=True)
class Settings:
    """Options of a conversion, the same for all directions."""

    dtype: str | None = None
    """Data type of the result, one of `arrays.FLOATS`; None: each tensor keeps its type."""
    workers: int | None = None
    """Number of processes. None: one per CPU core, or one in all for less than 64 MB."""
    progress: Progress | None = None
    """Called with the number of bytes written since the previous call."""
    note: Callable[[str], None] = lambda _: None
    """Called with each note for the user: what is left out, and which of two files was chosen."""
    announce: Callable[[int], None] | None = None
    """Called once, with the number of bytes of tensors that will be written."""
    flush: bool = False
    """Wait until everything is on the disk, so that a power failure loses nothing. `cp` does not
    wait."""


@dataclass(frozen=True)
class LayoutFiles:
    """Files of a Megatron layout that a source is converted to, and the tensors in them."""

    fulls: list[FullTensor]
    """Full tensors of the source."""
    rows: dict[str, int]
    """Length of the first dimension of each full tensor with padding, by Megatron name."""
    files: dict[str, dict[str, Spec]]
    """Type and shape of each shard, by file name and then by Megatron name."""


def layout_of(source: Source, sizes: ParallelSizes, settings: Settings) -> LayoutFiles:
    """Plan the files of a Megatron layout.

    Raises:
        LayoutError: the model does not divide over `sizes`.
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
    finish: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write a Hugging Face checkpoint or a Megatron layout as a Megatron layout of `sizes`.

    Args:
        dst: folder to write; must not exist.
        finish: callback that writes further files into the folder, given its temporary name.

    Raises:
        LayoutError: the model does not divide over `sizes`.
        ConversionError: `dst` exists, the disk is too small, or a tensor cannot be converted.
    """
    _begin(source, dst, settings)
    layout = layout_of(source, sizes, settings)
    num_bytes = _announced(layout.files, settings)
    with complete_or_absent(dst, num_bytes, flush=settings.flush) as folder:
        made = create_files((folder / name, specs) for name, specs in layout.files.items())
        jobs = []
        for full in layout.fulls:
            name, files = full.task.name, files_of(full.task, sizes, source.table)
            pieces = tuple(made[folder / file][name] for file in files)
            jobs.append(_job(full, McoreSide(pieces, layout.rows[name])))
        _run(jobs, source, folder, settings)
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
        finish(folder)


def to_hf(
    source: Source,
    dst: Path,
    settings: Settings,
    *,
    deltas: Mapping[str, Delta] | None = None,
    max_shard_bytes: int | None = None,
    single: str = "model.safetensors",
    finish: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write a Megatron layout as Hugging Face files.

    Args:
        dst: folder to write; must not exist.
        deltas: low-rank updates to add, by Hugging Face name of the weight.
        max_shard_bytes: largest number of bytes of one file. Default: see `shard_bytes`.
        single: name of the file if one file is enough.
        finish: callback that writes further files into the folder, given its temporary name.

    Raises:
        ConversionError: `dst` exists, the disk is too small, a tensor cannot be converted, or a
            delta does not fit a tensor.
    """
    _begin(source, dst, settings)
    deltas = deltas or {}
    fulls = [source.full(task) for task in source.plan(ParallelSizes())]
    specs = _hf_specs(fulls, source, deltas, settings)
    files = split_files(specs, max_shard_bytes or shard_bytes(specs), single)
    with complete_or_absent(dst, _announced(files, settings), flush=settings.flush) as folder:
        made = create_files((folder / name, held) for name, held in files.items())
        where = {name: piece for pieces in made.values() for name, piece in pieces.items()}
        jobs = [job for full in fulls for job in _hf_jobs(full, source, where, deltas)]
        _run(jobs, source, folder, settings)
        if len(files) > 1:
            write_index(folder / "model.safetensors.index.json", files)
        finish(folder)


def _begin(source: Source, dst: Path, settings: Settings) -> None:
    """Raise ConversionError if `dst` exists; pass the notes of the source on to the user."""
    refuse_existing(dst)
    for note in source.notes:
        settings.note(note)


def _hf_specs(
    fulls: Sequence[FullTensor], source: Source, deltas: Mapping[str, Delta], settings: Settings
) -> dict[str, Spec]:
    """Return type and shape of each Hugging Face tensor to write, by name.

    Raises:
        ConversionError: a delta does not fit a tensor.
    """
    specs: dict[str, Spec] = {}
    dtypes: dict[str, str] = {}
    for full in fulls:
        parts = full.task.param.op.to_hf(Outline(full.spec.shape), source.table.shape)
        for ref, part in zip(full.task.hf, parts, strict=True):
            stacked = (source.table.shape.num_experts,) if ref.index is not None else ()
            specs[ref.name] = Spec(_target_dtype(full, settings), (*stacked, *part.shape))
            dtypes[ref.name] = full.spec.dtype
    for name, delta in deltas.items():
        _check_delta(name, delta, specs)
        _check_delta_dtypes(name, delta, dtypes[name])
    return specs | {name: specs[source.table.repeats[name]] for name in source.repeats}


def _hf_jobs(
    full: FullTensor, source: Source, where: Mapping[str, Piece], deltas: Mapping[str, Delta]
) -> list[Job]:
    """Return the jobs that write a tensor in Hugging Face format, once for each of its names."""
    refs = full.task.hf
    added = tuple(deltas.get(ref.name) for ref in refs)
    repeated = [name for name in source.repeats if source.table.repeats[name] == refs[0].name]
    places = [pieces_of(refs, where), *((where[name],) for name in repeated)]
    return [_job(full, HfSide(pieces, added)) for pieces in places]


def _check_delta(name: str, delta: Delta, specs: Mapping[str, Spec]) -> None:
    """Raise ConversionError unless the model has the weight and B A has the weight's shape."""
    if name not in specs:
        raise ConversionError(f"the adapter changes {name}, which the model does not have")
    product = (delta.b.spec.shape[0], delta.a.spec.shape[-1])
    if specs[name].shape != product or delta.b.spec.shape[1] != delta.a.spec.shape[0]:
        raise ConversionError(
            f"the adapter adds {list(product)} to {name}, which is {list(specs[name].shape)}; "
            "is it of another model?"
        )


def _check_delta_dtypes(name: str, delta: Delta, dtype: str) -> None:
    """Raise ConversionError unless a weight of the type `dtype` and both factors of its delta can
    be added in float32."""
    of_factors = (delta.a.spec.dtype, delta.b.spec.dtype)
    wrong = next((each for each in (dtype, *of_factors) if each not in FLOATS.values()), None)
    if wrong is not None:
        raise ConversionError(
            f"{name} is of type {dtype} and its factors are of types {' and '.join(of_factors)}; a "
            f"merge adds {', '.join(FLOATS.values())} only, so leave --merge out"
        )


def _job(full: FullTensor, target: HfSide | McoreSide) -> Job:
    """Return the job that converts a full tensor of the source and writes it to `target`."""
    param = full.task.param
    names = ", ".join(ref.name for ref in full.task.hf)
    return Job(names, param.op, param.shard, full.side, target, full.spec.shape[0])


def _target_dtype(full: FullTensor, settings: Settings) -> str:
    """Return the type that a tensor gets, which is its own if none is asked for or it keeps it."""
    found = full.spec.dtype
    if settings.dtype is None or full.task.param.keeps_dtype:
        return found
    return FLOATS[settings.dtype]


def _announced(files: Mapping[str, Mapping[str, Spec]], settings: Settings) -> int:
    """Announce the bytes of all tensors; return the bytes that the disk needs, headers included."""
    total = sum(spec.num_bytes for specs in files.values() for spec in specs.values())
    if settings.announce is not None:
        settings.announce(total)
    return total + _PAGE_OF_META * (1 + len(files))


def _run(jobs: Sequence[Job], source: Source, folder: Path, settings: Settings) -> None:
    """Run the checks and jobs, then copy the source's further files to `folder`."""
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
    copy_companions(source.folder.path, folder, settings.dtype, without=(META,), note=settings.note)


def _vocab(source: Source) -> int | None:
    """Return the number of rows of the embedding without padding; None: there is no embedding."""
    if isinstance(source.folder, McoreFolder):
        return source.folder.vocab
    for full in source.tensors.values():
        if full.task.param.pads_vocab:
            return full.spec.shape[0]
    return None


def shard_bytes(specs: Mapping[str, Spec]) -> int:
    """Return the default for the largest size of one file, in bytes.

    It is a quarter of the model, but at least 512 MB and at most 5 GB.
    """
    total = sum(spec.num_bytes for spec in specs.values())
    return min(MAX_SHARD_BYTES, max(_MIN_SHARD_BYTES, total // _SHARDS))


def split_files(specs: Mapping[str, Spec], most: int, single: str) -> dict[str, dict[str, Spec]]:
    """Distribute tensors over files, in order.

    Args:
        most: largest number of bytes of one file. A larger tensor gets a file of its own.
        single: name of the file if one file is enough; several are called
            `model-00001-of-00002.safetensors` and so on.

    Returns:
        Tensors of each file, by file name.
    """
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
    """Write the JSON index that names the file of each tensor, as Hugging Face expects."""
    total = sum(spec.num_bytes for specs in files.values() for spec in specs.values())
    weight_map = {name: file for file, specs in files.items() for name in specs}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    path.write_text(json.dumps(content, indent=2))
