"""Runs the model in the process of vLLM's scheduler, where one process is all that it needs.

vLLM takes the class by its name (`distributed_executor_backend`). On CPUs it would by itself start
a worker process even for a single rank, because only a new process can have its threads bound to
cores; that costs 0.45 GB, and every step of the model waits for two messages. Here the process is
kept on its cores as a whole instead, before it has computing threads, which then stay there too.
"""

from __future__ import annotations

import os

from vllm.v1.executor.uniproc_executor import UniProcExecutor

from roll.strategy.vllm.compat import listen_locally

CORES = "VLLM_CPU_OMP_THREADS_BIND"
"""Set by `compat.engine_environment`; for one rank a list like `0,1`."""


class InSchedulerExecutor(UniProcExecutor):  # type: ignore[misc] # vLLM is untyped to mypy
    """One rank on the cores that its environment names."""

    def _init_executor(self) -> None:
        cores = {int(core) for core in os.environ[CORES].split(",")}
        os.sched_setaffinity(0, cores)
        listen_locally()
        super()._init_executor()
