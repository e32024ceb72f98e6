"""Run a function on several ranks, each a fresh process, and collect what they return.

A process is a fork of a server that has imported `tests.preloaded` and has run nothing.
"""

from __future__ import annotations

import multiprocessing as mp
import multiprocessing.connection
import os
import random
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from roll.config.sections.roles import Role
from roll.core.types import WorkerSpec
from roll.platform.machine import free_port

Job = Callable[[WorkerSpec, Path], Mapping[Any, Any]]


def make_spec(rank: int, world_size: int, port: int, platform: str = "cpu") -> WorkerSpec:
    return WorkerSpec(
        role=Role.ACTOR_TRAIN,
        rank=rank,
        world_size=world_size,
        devices=(rank,),
        cores=(rank,),
        node=0,
        host="127.0.0.1",
        rendezvous=f"127.0.0.1:{port}",
        seed=0,
        platform=platform,
    )


def run_ranks(
    world_size: int, job: Job, folder: Path, *, timeout_s: float, platform: str = "cpu"
) -> list[dict[Any, Any]]:
    """What `job(spec, folder)` returns on each rank; through files, so no pipe can fill up.

    On `cuda` rank i sees GPU i alone, as a worker of a run does.
    """
    port = free_port()
    # CUDA does not survive a fork, and the server's imports may have asked for its devices.
    context: Any = mp.get_context("spawn" if platform == "cuda" else "forkserver")
    folder.mkdir(parents=True, exist_ok=True)
    processes = [
        context.Process(
            target=_main, args=(job, make_spec(rank, world_size, port, platform), folder)
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            break  # the others wait in vain for one that failed
        alive = [process.sentinel for process in processes if process.is_alive()]
        multiprocessing.connection.wait(alive, 1)
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join(10)
    results = []
    for rank in range(world_size):
        error = folder / f"error_{rank}.txt"
        assert not error.exists(), error.read_text()
        result = folder / f"result_{rank}.pt"
        assert result.exists(), f"rank {rank} of {world_size} gave no result in {timeout_s} s"
        results.append(torch.load(result, weights_only=False, map_location="cpu"))
    return results


def _main(job: Job, spec: WorkerSpec, folder: Path) -> None:
    if spec.platform == "cuda":  # torch is imported, but looks for GPUs only at their first use
        os.environ["CUDA_VISIBLE_DEVICES"] = str(spec.rank)
    torch.set_num_threads(1)
    torch.manual_seed(spec.seed + spec.rank)
    random.seed()  # a fork has its server's state, and so would have its siblings'
    try:
        torch.save(job(spec, folder), folder / f"result_{spec.rank}.pt")
    except BaseException:
        (folder / f"error_{spec.rank}.txt").write_text(traceback.format_exc())
        raise
