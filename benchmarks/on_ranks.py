"""Runs a function on several ranks of this machine, each a process of its own.

The processes are forks of a server that has imported the backends and has run nothing.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import multiprocessing.connection
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from roll.config.sections.roles import Role
from roll.core.types import WorkerSpec
from roll.platform.machine import free_port

Job = Callable[..., dict[str, int]]

LIMIT_S = 3600
"""Longest time that the ranks may take."""
BACKENDS = [f"roll.strategy.{kind}.train" for kind in ("fsdp2", "deepspeed", "megatron")]


def run(ranks: int, job: Job, *arguments: Any) -> list[dict[str, int]]:
    """Return what `job(spec, *arguments)` returns on each rank. It is a function of a module.

    Raises:
        RuntimeError: a rank failed, and its error is on stderr; or it took longer than `LIMIT_S`.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(BACKENDS)
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        processes = [
            context.Process(target=_rank, args=(job, rank, ranks, port, folder, arguments))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + LIMIT_S
        while alive := [process.sentinel for process in processes if process.is_alive()]:
            if any(process.exitcode for process in processes) or time.monotonic() > deadline:
                break  # the others wait in vain for one that failed
            multiprocessing.connection.wait(alive, 1)
        for process in processes:
            process.kill()
            process.join(10)
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"a rank failed, see above, or took longer than {LIMIT_S} s")
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(ranks)]


def _rank(job: Job, rank: int, ranks: int, port: int, folder: str, arguments: Any) -> None:
    torch.set_num_threads(1)
    spec = WorkerSpec(
        role=Role.ACTOR_TRAIN,
        rank=rank,
        world_size=ranks,
        devices=(rank,),
        cores=(rank,),
        node=0,
        host="127.0.0.1",
        rendezvous=f"127.0.0.1:{port}",
        seed=0,
        platform="cpu",
    )
    (Path(folder) / str(rank)).write_text(json.dumps(job(spec, *arguments)))
