"""vLLM executor that runs a model of one process in the process of vLLM's scheduler.

vLLM loads the class by its name (`distributed_executor_backend`). On CPUs vLLM itself starts a
worker process even for one rank, because it can bind threads to cores only in a new process. That
costs 0.45 GB of memory, and every step of the model waits for two messages. Here the scheduler's
process is bound to its cores before it has computing threads; threads that it starts later stay on
these cores too.
"""

from __future__ import annotations

import os

from vllm.v1.executor.uniproc_executor import UniProcExecutor

from roll.strategy.vllm.compat import listen_locally, one_gloo_thread

CORES = "VLLM_CPU_OMP_THREADS_BIND"
"""Environment variable with the rank's cores, like `0,1`; `compat.engine_environment` sets it."""


class InSchedulerExecutor(UniProcExecutor):  # type: ignore[misc] # vLLM is untyped to mypy
    """Executor of one rank, which binds the process to the cores that the environment names."""

    def _init_executor(self) -> None:
        """Bind the process to its cores, then start the worker as vLLM does."""
        cores = {int(core) for core in os.environ[CORES].split(",")}
        os.sched_setaffinity(0, cores)
        listen_locally()
        with one_gloo_thread():
            super()._init_executor()
