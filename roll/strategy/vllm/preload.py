"""Imports of vLLM for a fork server on CPUs: inference workers and vLLM's cores are its forks."""

from __future__ import annotations

import os
import sys

import setproctitle  # noqa: F401  # vLLM's cores set their title with it

from roll.distributed.on_ray.environment import environment
from roll.strategy.vllm.compat import engine_environment

# vLLM imports Ray where it can. Ray keeps the environment of its import, which is a worker's own.
sys.modules["ray"] = None  # type: ignore[assignment]
try:
    # vLLM reads variables when it is imported.
    with environment(engine_environment("cpu", (0,), 1, os.environ)):
        import vllm.engine.arg_utils
        import vllm.v1.engine.async_llm
        import vllm.v1.engine.core
        import vllm.v1.worker.cpu_worker  # noqa: F401
finally:
    del sys.modules["ray"]
