"""A few processes that run one function each, joined by a gloo process group.

They are forks of a server that has imported `tests.preloaded`.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any


def run_ranks(
    work: Callable[..., Any], ranks: int, *args: object, timeout_s: float = 280
) -> list[Any]:
    """What `work(*args)` returns on each rank, in their order.

    Raises:
        RuntimeError: a rank raised; its traceback.
        TimeoutError: ranks that have not answered, and where they stand.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = start_ranks(work, ranks, Path(folder), *args, timeout_s=timeout_s)
        try:
            return _answers(pipes, Path(folder), timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def start_ranks(
    work: Callable[..., Any], ranks: int, folder: Path, *args: object, timeout_s: float = 280
) -> tuple[list[BaseProcess], list[Connection]]:
    """Processes that run `work(*args)`, and where each will put its answer.

    Args:
        folder: for what they exchange.
    """
    server = mp.get_context("forkserver")
    processes: list[BaseProcess] = []
    pipes = []
    for rank in range(ranks):
        ours, theirs = server.Pipe(duplex=False)
        process = server.Process(
            target=_rank, args=(work, rank, ranks, folder, theirs, timeout_s, args)
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    return processes, pipes


def _answers(pipes: list[Connection], folder: Path, timeout_s: float) -> list[Any]:
    found: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in found]
        ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [rank for rank in range(len(pipes)) if rank not in found]
            time.sleep(0.5)
            stacks = [(folder / f"stack{rank}").read_text() for rank in late]
            raise TimeoutError(
                f"ranks {late} gave no result in {timeout_s} s\n" + "\n".join(stacks)
            )
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                good, answer = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                raise RuntimeError(f"rank {rank} died without a word") from None
            if not good:
                raise RuntimeError(f"rank {rank} raised\n{answer}")
            found[rank] = answer
    return [found[rank] for rank in range(len(pipes))]


def _rank(
    work: Callable[..., Any],
    rank: int,
    ranks: int,
    folder: Path,
    pipe: Connection,
    timeout_s: float,
    args: tuple[object, ...],
) -> None:
    import torch
    import torch.distributed as dist

    with (folder / f"stack{rank}").open("w") as stack:
        faulthandler.dump_traceback_later(timeout_s, file=stack)
        try:
            torch.set_num_threads(1)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=timeout_s),
            )
            # Not `send`, which would leave tensors in the memory of a process that ends.
            pipe.send_bytes(pickle.dumps((True, work(*args))))
        except BaseException:  # noqa: BLE001 - raised again where it is awaited
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        faulthandler.cancel_dump_traceback_later()
