"""Workarounds for vLLM 0.32. Each is a function that says why it is needed.

The supported version range is in `roll/strategy/available.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil

from roll.config.sections.engines import CPU_BLOCK_TOKENS
from roll.distributed.on_ray.environment import environment
from roll.distributed.processes.child_forks import forked_children
from roll.platform.rendezvous import serve_on_named_address
from roll.strategy.vllm.outputs.gathered import GATHERS

YIELDS_CORES = "ROLL_VLLM_YIELDS_CORES"
"""Environment variable that is 1 in engines that share their cores with a trainer."""
BUSY_LOOP_S = 0.05
"""Time that a reader spins before it sleeps, in seconds.

With 0.0005 a generation once hung with all processes asleep. Probably the writer's queue, which
holds one wake-up, still held the last one, so that ZeroMQ dropped the next. A longer time avoids
this."""


def engine_environment(
    platform: str,
    cores: Sequence[int],
    processes: int,
    have: Mapping[str, str],
    host: str = "127.0.0.1",
    *,
    eager: bool = True,
) -> dict[str, str]:
    """Return the environment variables, name -> value, that vLLM needs in addition to `have`.

    Args:
        platform: `cpu` or `cuda`.
        cores: numbers of the cores of this replica.
        processes: number of processes in which the model runs, on this node.
        have: environment of this process. A variable that is set there is not returned, so that the
            user's value stays; except `VLLM_CPU_OMP_THREADS_BIND`, which binds threads to `cores`,
            and PyTorch's own default of the folder of compiled code.
        host: address at which the other nodes of the replica reach this one; of a replica on one
            node 127.0.0.1.
        eager: True if the model's layers run as they are.
    """
    wanted = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        # By default the processes of a replica would meet at the address under which the internet
        # is reached, also where all are on one machine.
        "VLLM_HOST_IP": host,
        GATHERS: "1",
    }
    if platform == "cpu":
        # Even in eager mode vLLM compiles its sampler with g++ at the first batch (8-15 s); the
        # compiled code is no faster.
        if eager:
            wanted["TORCHDYNAMO_DISABLE"] = "1"
        else:
            # In the mode of CPUs vLLM cannot read back what it keeps of compiled layers ("no
            # attribute 'finalize_loading'"), and compiles at each start: 10 in place of 4 s.
            wanted["VLLM_USE_AOT_COMPILE"] = "0"
        wanted[YIELDS_CORES] = "1"
        # oneDNN keeps one kernel per shape, and the number of tokens in a batch is part of the
        # shape. With its default of 1,024 kernels an engine of a small model grows by 430 MB in
        # minutes, and is not faster (benchmarks/kernel_cache.py).
        wanted["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "64"
        if processes == 1:
            # vLLM sets the number of threads in workers that it starts, not in its scheduler.
            wanted["OMP_NUM_THREADS"] = str(len(cores) or 1)
    wanted = {name: value for name, value in wanted.items() if name not in have}
    if platform == "cpu":
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = thread_binding(cores, processes)
        if not eager:
            from roll.models.kernels.compiled import FOLDER, cache_folder

            wanted[FOLDER] = cache_folder(have)
    return wanted


@contextmanager
def forked_core() -> Iterator[None]:
    """Let vLLM start its core as a fork during the block, if this process has a fork server that no
    earlier block has used; otherwise as a new interpreter, as vLLM wants it in Ray actors.

    The block replaces a function of vLLM and sets an environment variable, for all of the process.
    """
    with forked_children() as context:
        if context is None:
            yield
            return
        from vllm.v1.engine import utils

        of_vllm = utils.get_mp_context
        utils.get_mp_context = lambda: context
        try:
            # The core has threads when it starts processes for further ranks.
            with environment({"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}):
                yield
        finally:
            utils.get_mp_context = of_vllm


def yield_cores() -> None:
    """Let vLLM's processes sleep between messages instead of spinning for a second after each.

    vLLM calls this function in all of its processes, as a plug-in (`vllm.general_plugins` in
    setup.py). It acts only in engines that `engine_environment` marks with `YIELDS_CORES`. Without
    it, a worker occupies a core that the trainer needs. vLLM has no setting for the time its
    readers spin; when it gets one, this function can be deleted.
    """
    if os.environ.get(YIELDS_CORES) != "1":
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__.__defaults__ = (BUSY_LOOP_S,)


def listen_locally() -> None:
    """Let the stores of vLLM's process groups listen on `VLLM_HOST_IP` only.

    vLLM calls this function as a plug-in, like `yield_cores`. PyTorch's stores listen on all
    interfaces, whatever address they are given.
    """
    if os.environ.get("VLLM_HOST_IP"):
        serve_on_named_address()


@contextmanager
def one_gloo_thread() -> Iterator[None]:
    """Let all process groups of gloo that are made during the block share one thread for messages.

    Only for a model of one process, whose groups have nobody to talk to: they get an address of
    this machine alone. vLLM makes 13 groups also for one process, and each thread of gloo wakes a
    hundred times a second, whether or not there is a message (benchmarks/wakeups.py), and
    interrupts a policy that trains on the same cores. PyTorch has no argument for this, so the
    block replaces the class that it makes groups with.
    """
    from torch.distributed import distributed_c10d

    of_torch = distributed_c10d.ProcessGroupGloo
    device = of_torch.create_device(hostname="127.0.0.1")

    class OneThread(of_torch):  # type: ignore[misc,valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = of_torch._Options()  # type: ignore[attr-defined]
            options._devices = [device]
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OneThread  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = of_torch  # type: ignore[misc]


def thread_binding(cores: Sequence[int], processes: int) -> str:
    """Give each process an equal share of the cores, as vLLM writes it: `0,1|2,3`.

    With fewer cores than processes every process gets all cores. vLLM's default needs one NUMA node
    per process.
    """
    if len(cores) < processes:
        return "|".join([",".join(map(str, cores)) or "0"] * processes)
    share = len(cores) // processes
    return "|".join(
        ",".join(map(str, cores[i * share : (i + 1) * share])) for i in range(processes)
    )


def cpu_arguments(kv_cache_bytes: int, max_model_len: int, *, processes: int) -> dict[str, Any]:
    """Return the engine arguments that only CPUs need.

    - The size of the KV cache is always given. Otherwise vLLM takes most of the machine's memory
      and also runs a warm-up.
    - Prompts are not split into chunks. For a chunk of a *seeded* request vLLM rewinds its random
      generator, which CPU generators cannot do ("CPU Generator does not use offset"), and this
      error kills the engine. So a prompt must fit into one batch.
    - Blocks of the KV cache are small, see `CPU_BLOCK_TOKENS`.
    - A model of one process computes in the process of the scheduler (see executor.py).

    Args:
        kv_cache_bytes: size of the KV cache of each process.
        max_model_len: largest length of prompt plus response, in tokens.
        processes: number of processes in which the model runs.
    """
    arguments: dict[str, Any] = {
        "kv_cache_memory_bytes": kv_cache_bytes,
        "enable_chunked_prefill": False,
        "block_size": CPU_BLOCK_TOKENS,
        "max_num_batched_tokens": max(8192, max_model_len),
    }
    if processes == 1:
        executor = "roll.strategy.vllm.executor.InSchedulerExecutor"
        arguments["distributed_executor_backend"] = executor
    return arguments


def shut_down(engine: Any, timeout_s: float) -> None:
    """Shut an engine down, also if one of its processes ends at the very moment at which it is to
    be killed.

    After the time limit vLLM looks up a process and then its children. If the process ends in
    between, the error of psutil leaves the rest undone: sockets and threads of this process.

    Args:
        engine: an `AsyncLLM`.
        timeout_s: time in which its processes may end by themselves, in seconds.
    """
    try:
        engine.shutdown(timeout_s)
    except psutil.NoSuchProcess:
        engine.engine_core.resources()


def forget_aborted_groups(output_processor: Any) -> None:
    """Remove requests with several siblings that were all aborted.

    vLLM 0.32 removes such a request when its last sibling finishes, but not when it is aborted by
    its own id. It then stays, with the outputs of all siblings, as long as the engine runs.
    """
    groups = output_processor.parent_requests
    for request_id in [key for key, group in groups.items() if not group.child_requests]:
        del groups[request_id]


def keep_deaths_quiet() -> None:
    """Hide vLLM's traceback when its core dies: EngineDiedError names the dead process."""
    logging.getLogger("vllm.v1.engine.async_llm").setLevel(logging.CRITICAL)
