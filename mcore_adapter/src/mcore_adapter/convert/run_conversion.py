"""Execution of a conversion: tensors are read from files, converted, and written to files.

A `Job` handles one full Megatron tensor. The tensor is read from Hugging Face files or from shards,
converted, and written to shards or to Hugging Face files. All places in the files are known before
the first job starts. Jobs do not depend on each other, so they run in any order and in several
processes. Each process holds one tensor at a time. A process reads memory-mapped files and writes
at known places, so the processes need no communication with each other.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from mcore_adapter.convert.arrays import Bits, convert, from_float, join, to_float, zeros
from mcore_adapter.convert.joined_arrays import Joined
from mcore_adapter.convert.ops import FormatOp, Shape
from mcore_adapter.convert.shards import ShardRule
from mcore_adapter.convert.storage.signals import leave_to_parent, signals_delayed
from mcore_adapter.convert.storage.tensor_file import Piece, Reader, Spec, Writer, make_header
from mcore_adapter.errors import ConversionError, McoreAdapterError

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h of glibc

_EXIT_S = 10
"""Time limit for a process to end after its pipe was closed, in seconds."""

Progress = Callable[[int], None]
"""Callback that receives the number of bytes written since the previous call."""


@dataclass(frozen=True, slots=True)
class HfSide:
    """Hugging Face side of a job: the full tensors, in the order of the operator."""

    pieces: tuple[Piece, ...]
    deltas: tuple[Delta | None, ...] = ()
    """Low-rank update to add to each tensor before it is written; None: no update of this tensor.
    An empty tuple means no updates at all."""


@dataclass(frozen=True, slots=True)
class McoreSide:
    """Megatron side of a job: the shards of one tensor, in the order of tensor parallel ranks."""

    pieces: tuple[Piece, ...]
    rows: int
    """Length of the first dimension of the full tensor, padding included."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Low-rank update scale * B A of a weight, where A is `[rank, in]` and B is `[out, rank]`."""

    a: Piece
    b: Piece
    scale: float


@dataclass(frozen=True, slots=True)
class Job:
    """Conversion of one full Megatron tensor: where to read, how to convert, where to write."""

    name: str
    """Names of the Hugging Face tensors, for error messages."""
    op: FormatOp
    shard: ShardRule
    source: HfSide | McoreSide
    target: HfSide | McoreSide
    rows: int
    """Length of the first dimension of the full tensor without padding."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the job writes."""
        return sum(piece.spec.num_bytes for piece in self.target.pieces)


@dataclass(frozen=True, slots=True)
class EqualPair:
    """Pair of tensors that must be equal, because only one of them is converted."""

    one: Piece
    other: Piece
    names: tuple[str, str]
    """Names of both tensors, for the error message."""


def create_files(files: Iterable[tuple[Path, dict[str, Spec]]]) -> dict[Path, dict[str, Piece]]:
    """Create or replace files, with their headers and empty room for all tensors.

    Returns:
        Place of each tensor, by path of the file and name of the tensor.
    """
    made = {}
    for path, specs in files:
        header, made[path] = make_header(specs, path)
        size = len(header) + sum(spec.num_bytes for spec in specs.values())
        with path.open("wb") as file:
            file.write(header)
            # free space was checked before; if the disk fills up later, writing raises an error
            file.truncate(size)
    return made


def run(
    jobs: Sequence[Job],
    checks: Sequence[EqualPair],
    shape: Shape,
    *,
    workers: int,
    write_back: bool = False,
    progress: Progress | None = None,
) -> None:
    """Run all checks and jobs.

    They run in this process if `workers` is 1 or if there is work for one process only.

    Args:
        jobs: tensors to convert; each process gets neighbouring ones.
        workers: largest number of processes.
        write_back: start writing to the disk at once, because the caller waits for the disk later.

    Raises:
        ConversionError: tensors that must be equal differ, or a tensor cannot be converted to the
            target type.
        McoreAdapterError: a process ended early or failed.
        OSError: a file cannot be read or written.
    """
    report = progress or (lambda _: None)
    shares = [share for share in _split_jobs(jobs, workers) if share]
    if len(shares) < 2:
        _work(jobs, checks, shape, write_back, report)
    else:
        _work_in_processes(shares, checks, shape, write_back, report)


def _work_in_processes(
    shares: Sequence[Sequence[Job]],
    checks: Sequence[EqualPair],
    shape: Shape,
    write_back: bool,
    report: Progress,
) -> None:
    """Let one child process do each share of the jobs, and the first of them the checks, too."""
    # fork starts fastest, but is safe only if this process has no other threads; a caller may have
    context: Any = multiprocessing.get_context("fork" if threading.active_count() == 1 else "spawn")
    running: dict[Connection, Any] = {}
    try:
        for index, share in enumerate(shares):
            of_first = checks if index == 0 else ()
            # A signal after `start` and before `running` has the process would leave it behind.
            with signals_delayed():
                here, there = context.Pipe(duplex=False)
                process = context.Process(
                    target=_worker, args=(share, of_first, shape, write_back, there), daemon=True
                )
                process.start()
                running[here] = process
                there.close()
        _listen(running, report)
    finally:
        with signals_delayed():
            for process in running.values():
                process.kill()
            for process in running.values():
                process.join()


def _listen(running: Mapping[Connection, Any], report: Progress) -> None:
    """Report the progress of all processes until each has ended; raise the first error of any."""
    left = list(running)
    while left:
        for end in wait(left):
            assert isinstance(end, Connection)
            try:
                message = end.recv()
            except EOFError:
                raise McoreAdapterError(_death(running[end])) from None
            if isinstance(message, Exception):
                raise message
            if message is None:
                left.remove(end)
            else:
                report(message)


def _death(process: Any) -> str:
    """Return the error message for a process that ended without an answer."""
    process.join(_EXIT_S)
    code = process.exitcode
    name = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    why = {
        "SIGKILL": "; is memory short?",
        "SIGBUS": ": a file that was read became shorter, or its disk failed",
    }
    return f"a process that converts ended early by {name}{why.get(name, '')}"


def _worker(
    jobs: Sequence[Job],
    checks: Sequence[EqualPair],
    shape: Shape,
    write_back: bool,
    there: Connection,
) -> None:
    """Work in a child process: send the parent each progress, then None, or the error instead."""
    leave_to_parent()
    _reuse_freed_memory()
    try:
        # if the parent was killed, sending to it raises BrokenPipeError, which ends this process
        _work(jobs, checks, shape, write_back, there.send)
        there.send(None)
    except BrokenPipeError:
        os._exit(1)
    except (McoreAdapterError, OSError) as error:
        there.send(error)
    except MemoryError:
        there.send(McoreAdapterError("memory is short; use fewer --workers"))
    except Exception as error:  # noqa: BLE001 - its own traceback would be lost with the process
        there.send(McoreAdapterError(f"a process that converts failed: {error!r}"))


def _reuse_freed_memory() -> None:
    """Make glibc reuse the memory of freed tensors.

    A conversion allocates and frees tensors of a few sizes, one after the other. By default glibc
    maps new pages for each large tensor, and the kernel clears these pages. This takes about as
    long as the conversion itself. Afterwards all tensors of this process lie on the heap, which
    never shrinks. Without glibc this function does nothing.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _work(
    jobs: Sequence[Job],
    checks: Sequence[EqualPair],
    shape: Shape,
    write_back: bool,
    report: Progress,
) -> None:
    """Run the checks, then convert job by job; report the bytes written after each job."""
    reader = Reader()
    writer = Writer(reader, write_back=write_back)
    try:
        for check in checks:
            if not np.array_equal(_bits(reader.read(check.one)), _bits(reader.read(check.other))):
                one, other = check.names
                raise ConversionError(f"{one} differs from {other}; Megatron has them as one")
            reader.release((check.one, check.other))
        for job in jobs:
            try:
                _convert(job, shape, reader, writer)
            except OverflowError as error:
                raise ConversionError(f"{job.name} {error}") from None
            reader.release(job.source.pieces)
            report(job.num_bytes)
    finally:
        writer.close()
        reader.close()


def _bits(tensor: Bits) -> Bits:
    """Return the bytes of a tensor, in one dimension."""
    return tensor.reshape(-1).view(np.uint8)


def _convert(job: Job, shape: Shape, reader: Reader, writer: Writer) -> None:
    """Convert one tensor and write its pieces; rows that pad it are 0, LoRA deltas are added."""
    parts = [Joined((reader.read(piece),)) for piece in job.source.pieces]
    if isinstance(job.source, HfSide):
        full = job.op.to_mcore(parts, shape)
    else:
        full = job.shard.merge(parts)
        if job.source.rows != job.rows:
            full = full[: job.rows]
    dtype = job.source.pieces[0].spec.dtype
    target = job.target
    if isinstance(target, McoreSide):
        if target.rows != job.rows:
            full = join([full, zeros(full, (target.rows - job.rows, *full.shape[1:]))])
        for piece, shard in zip(
            target.pieces, job.shard.split(full, len(target.pieces)), strict=True
        ):
            writer.write(piece, convert(shard, dtype, piece.spec.dtype))
        return
    deltas = target.deltas or (None,) * len(target.pieces)
    for piece, part, delta in zip(target.pieces, job.op.to_hf(full, shape), deltas, strict=True):
        if delta is not None:
            merged = to_float(np.asarray(part), dtype) + _product(delta, reader)
            writer.write(piece, Joined((from_float(merged, piece.spec.dtype),)))
        else:
            writer.write(piece, convert(part, dtype, piece.spec.dtype))


def _product(delta: Delta, reader: Reader) -> Bits:
    """Return the update scale * B A, in float32."""
    a, b = (to_float(reader.read(piece), piece.spec.dtype) for piece in (delta.a, delta.b))
    return np.float32(delta.scale) * (b @ a)


def _split_jobs(jobs: Sequence[Job], workers: int) -> list[list[Job]]:
    """Split the jobs into `workers` lists, in order, with about equal numbers of bytes.

    A list can be empty.
    """
    total = sum(job.num_bytes for job in jobs)
    shares: list[list[Job]] = [[] for _ in range(workers)]
    done = 0
    for job in jobs:
        shares[min(done * workers // max(total, 1), workers - 1)].append(job)
        done += job.num_bytes
    return shares
