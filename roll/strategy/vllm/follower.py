"""`VllmFollower`: the part of a vLLM engine on one of its further nodes, owned by this process.

vLLM's multiprocessing executor runs on every node of an engine. That of the first node has the
scheduler and sends each step to all processes, also to those that the executors of the other nodes
have started. These executors only start their processes and end them.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import psutil

from roll.config.sections.engines import VllmConfig
from roll.core.errors import EngineDiedError, EngineError
from roll.strategy.available import check_engine
from roll.strategy.backend_setup import EngineSetup
from roll.strategy.serving.processes import DeathWatch, new_children
from roll.strategy.vllm.engine import prepared_arguments

_SHUTDOWN_S = 5.0


class VllmFollower:
    """Part of a vLLM engine on a further node; implements `EnginePart`."""

    def __init__(self, config: VllmConfig, setup: EngineSetup) -> None:
        self._config = config
        self._setup = setup
        self._before: set[psutil.Process] = set()
        spec = setup.spec
        self._name = f"the part of vLLM on node {spec.host} ({spec.name})"
        self._watch = DeathWatch(self._name)
        self._executor: Any = None
        self._closed = False

    async def follow(self) -> None:
        """Load the model; then let the processes here compute what the first node asks for, until
        one of them ends or `close` is called.

        Raises:
            EngineMissingError: vLLM is missing here, or its version is not supported.
            EngineError: the processes could not start.
            EngineDiedError: one of them died.
        """
        check_engine("vllm")
        self._before = set(psutil.Process().children(recursive=True))
        try:
            await asyncio.to_thread(self._build)
        except Exception as error:
            raise EngineError(f"{self._name} could not start: {error}") from error
        self._watch.begin(new_children(self._before))
        try:
            await self._watch.until_dead(asyncio.Event().wait())
        except EngineDiedError:
            if not self._closed:
                raise

    async def close(self) -> None:
        """End the processes."""
        self._closed = True
        self._watch.end()
        processes = list(new_children(self._before))
        executor, self._executor = self._executor, None
        # The first node may be gone, and then processes wait for it: nobody waits for them.
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if executor is not None:
            await asyncio.to_thread(executor.shutdown)
        await asyncio.to_thread(psutil.wait_procs, processes, _SHUTDOWN_S)

    def _build(self) -> None:
        """Start the processes, and wait until the engine is complete on all nodes."""
        arguments = prepared_arguments(self._config, self._setup)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        config = AsyncEngineArgs(**arguments).create_engine_config(headless=True)
        self._executor = MultiprocExecutor(config, monitor_workers=False)
