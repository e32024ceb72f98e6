"""Where vLLM 0.32 needs help: each difference or workaround is a function that says why.

The supported version range itself stands in `roll/strategy/available.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from roll.platform.rendezvous import serve_on_named_address

DEFAULT_CPU_KV_CACHE_BYTES = 64 << 20
YIELDS_CORES = "ROLL_VLLM_YIELDS_CORES"
"""Set to 1 in the environment of engines that share their cores with a trainer."""
BUSY_LOOP_S = 0.05
"""Seconds. With 0.0005 a generation once hung with all processes asleep; probably the writer's
queue of one still held the last wake-up, and ZeroMQ dropped the next. This gives it time."""


def engine_environment(
    platform: str, cores: Sequence[int], processes: int, have: Mapping[str, str]
) -> dict[str, str]:
    """Variables vLLM reads only from the environment; what the user has set stays, cores aside."""
    wanted = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        # All processes of a replica are on one machine; by itself vLLM has them meet at the address
        # by which other machines know it.
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if platform == "cpu":
        # Even in eager mode vLLM compiles its sampler with g++ at the first batch (8-15 s); the
        # compiled code is no faster.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
        # Idle OpenMP threads sleep instead of spinning on cores that others need. On cores of its
        # own an engine is up to twice as fast with GOMP_SPINCOUNT=300000, which a user may set;
        # beside one busy process, threads that spin took 24 ms a step instead of 10.
        wanted["OMP_WAIT_POLICY"] = "passive"
        wanted[YIELDS_CORES] = "1"
        if processes == 1:
            # vLLM counts the threads of the workers it starts, not those of its scheduler.
            wanted["OMP_NUM_THREADS"] = str(len(cores) or 1)
    wanted = {name: value for name, value in wanted.items() if name not in have}
    if platform == "cpu":
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = thread_binding(cores, processes)
    return wanted


def yield_cores() -> None:
    """Let vLLM's processes sleep between messages instead of spinning for a second after each.

    vLLM loads this in all of its processes by its own plug-in point (`vllm.general_plugins` in
    setup.py); it acts only in engines that `engine_environment` marks. Without it, the worker
    occupies a core while the trainer on the same cores waits for it: vLLM has no setting for the
    time its readers spin. To be deleted when it gets one.
    """
    if os.environ.get(YIELDS_CORES) != "1":
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__.__defaults__ = (BUSY_LOOP_S,)


def listen_locally() -> None:
    """Let the stores of vLLM's process groups listen on `VLLM_HOST_IP` only.

    Loaded like `yield_cores`. PyTorch's listen on all interfaces, whatever address they are given.
    """
    if os.environ.get("VLLM_HOST_IP"):
        serve_on_named_address()


def thread_binding(cores: Sequence[int], processes: int) -> str:
    """An equal share of the cores for each process; by itself vLLM wants one NUMA node for each."""
    if len(cores) < processes:
        return "|".join([",".join(map(str, cores)) or "0"] * processes)
    share = len(cores) // processes
    return "|".join(
        ",".join(map(str, cores[i * share : (i + 1) * share])) for i in range(processes)
    )


def cpu_arguments(
    kv_cache_gb: float | None, max_model_len: int, *, processes: int
) -> dict[str, Any]:
    """Engine arguments that only CPUs need.

    - Without an explicit KV cache size vLLM takes most of the machine's memory, and then also runs
      a warm-up.
    - Prompts are not cut into chunks: a chunk of a *seeded* request makes vLLM rewind its random
      generator, which CPU generators cannot do ("CPU Generator does not use offset"), and that
      error kills the engine. A prompt must then fit into one batch.
    - A model of one process computes in the scheduler's (see executor.py).
    """
    size = DEFAULT_CPU_KV_CACHE_BYTES if kv_cache_gb is None else int(kv_cache_gb * (1 << 30))
    arguments: dict[str, Any] = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": size,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(8192, max_model_len),
    }
    if processes == 1:
        executor = "roll.strategy.vllm.executor.InSchedulerExecutor"
        arguments["distributed_executor_backend"] = executor
    return arguments


def keep_deaths_quiet() -> None:
    """Without vLLM's traceback when its core is gone: EngineDiedError says which process it was."""
    logging.getLogger("vllm.v1.engine.async_llm").setLevel(logging.CRITICAL)
