"""`SglangEngine`: one replica of SGLang, which runs in another process (`server.py`).

Except for `start` and `close`, every method calls the same method of `Replica` in that process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

import psutil

from roll.config.sections.engines import NO_PICTURES, SglangConfig
from roll.core.completion import Completion
from roll.core.errors import EngineError
from roll.core.types import GenerateRequest, Heartbeat
from roll.models.load import load_config
from roll.models.overrides import replaced_values
from roll.strategy.backend_setup import EngineSetup
from roll.strategy.hf_folder import read_checkpoint
from roll.strategy.interfaces import LoadReport
from roll.strategy.serving.processes import DeathWatch, children_of
from roll.strategy.serving.sleep import SleepState
from roll.strategy.sglang.arguments import engine_arguments, engine_environment
from roll.strategy.sglang.calls import Calls
from roll.strategy.sglang.interpreter import check_sglang, code_path, command
from roll.strategy.sglang.messages import StartMessage
from roll.strategy.sglang.replica import Replica
from roll.strategy.sglang.supported_arguments import check_arguments
from roll.weight_sync.channel import Channel

R = TypeVar("R")
_SHUTDOWN_S = 5.0
_OWN_FILES = " /dev/shm/sgl"
"""Beginning of the names of the files that SGLang shares between the processes of an engine."""


class SglangEngine:
    """Replica of SGLang in another process; implements `InferenceStrategy`."""

    def __init__(self, config: SglangConfig, setup: EngineSetup) -> None:
        """Keep the settings; `start` starts the process."""
        self._config = config
        self._spec = setup.spec
        self._model = setup.model
        self._dtype = setup.dtype
        self._max_model_len = config.max_model_len or setup.max_model_len
        self._name = f"SGLang of {setup.spec.name}"
        self._watch = DeathWatch(self._name)
        self._processes: list[psutil.Process] = []
        """The engine's processes, listed at the start: children of a dead process are not found."""
        self._files: set[Path] = set()
        """The files that they share, listed at the start for the same reason."""
        self._sleep = SleepState(setup.spec.platform)
        self._open = contextlib.AsyncExitStack()
        """What `close` must undo: the process, its files and the connection to it."""
        self._beating = asyncio.Lock()
        self._beat: asyncio.Future[Heartbeat] | None = None
        """Heartbeat that is under way, or whose caller stopped waiting for it; else None."""

    async def start(self) -> None:
        """Load the model; return when the engine can serve.

        Raises:
            EngineMissingError: SGLang is missing or its version is not supported; the message says
                what to install.
            ConfigError: one of `engine_args` is unknown, or may not be set.
            EngineError: SGLang could not start.
        """
        python = self._config.python
        await asyncio.to_thread(check_sglang, python)
        check_arguments(self._config.engine_args, python)
        order = await asyncio.to_thread(self._order)
        server, connection = self._launch()
        self._calls = Calls(connection, self._name)
        self._open.callback(self._calls.end)
        try:
            await self._calls.begin(order)
        except (EngineError, ConnectionError) as error:
            await self.close()
            raise EngineError(f"{self._name} could not start: {error}") from error
        except BaseException:
            await self.close()
            raise
        main = psutil.Process(server.pid)
        processes = {main: f"process {main.pid} (main)"} | children_of(main)
        self._processes = list(processes)
        self._files = _shared_files(processes)
        self._watch.begin(processes)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Generate the completions of a request; see `InferenceStrategy.generate`.

        Raises:
            EngineError: also if the request has pictures. SGLang's log-probs after pictures are not
                those of the trainer in all families, and its embeddings of pictures outlive a push
                of weights.
        """
        if request.pictures is not None:
            raise EngineError(f"request {request.id!r} has pictures, and {NO_PICTURES}")
        call = self._calls.call(Replica.generate, request)
        try:
            return await self._ask(call)
        except asyncio.CancelledError:
            self._calls.call(Replica.abort, request.id)
            raise

    async def abort(self, request_id: str) -> None:
        await self._ask(self._calls.call(Replica.abort, request_id))

    async def heartbeat(self) -> Heartbeat:
        """Make a round trip to SGLang's schedulers; report the tokens written since the last one.

        Schedulers answer between two steps of the model. During a push of weights they are not
        asked. If a caller gives up waiting, the next call returns the answer that was meant for it.
        """
        async with self._beating:
            if self._beat is None:
                self._beat = self._calls.call(Replica.heartbeat)
            try:
                return await self._ask(asyncio.shield(self._beat))
            finally:
                if self._beat.done():  # also with an error, which the next call must not get
                    self._beat = None

    async def load_weights(
        self, channel: Channel, version: int, *, receiver: int, verify: bool
    ) -> LoadReport:
        call = self._calls.call(
            Replica.load_weights, channel, version, receiver=receiver, verify=verify
        )
        return await self._ask(call)

    async def sleep(self, *, drop_weights: bool = False) -> None:
        """Free the memory that is not free yet; `drop_weights` changes nothing."""
        await self._sleep.sleep(lambda tags: self._ask(self._calls.call(Replica.sleep, list(tags))))

    async def wake(self, *, weights_only: bool = False) -> None:
        await self._sleep.wake(
            lambda tags: self._ask(self._calls.call(Replica.wake, list(tags))),
            weights_only=weights_only,
        )

    async def close(self) -> None:
        """Stop the engine and its processes; calls that still wait get an EngineDiedError."""
        self._watch.end()
        await self._open.aclose()

    async def _ask(self, call: asyncio.Future[R]) -> R:
        """Wait for an answer; EngineDiedError: a process of the engine died."""
        try:
            return await self._watch.until_dead(call)
        except ConnectionError as error:
            raise await self._watch.cause(timeout_s=_SHUTDOWN_S) from error

    def _order(self) -> StartMessage:
        """Return what SGLang's process needs to start, such as the checkpoint's tensor shapes."""
        checkpoint = read_checkpoint(self._model)
        cpu = self._spec.platform == "cpu"
        arguments = engine_arguments(
            self._config,
            self._model,
            dtype=self._dtype,
            max_model_len=self._max_model_len,
            seed=self._spec.seed,
            cpu=cpu,
            overrides=replaced_values(load_config(self._model), self._model.overrides),
        )
        return StartMessage(
            arguments=arguments,
            tokenizer=self._model.tokenizer or self._model.path,
            trust_remote_code=self._model.trust_remote_code,
            max_model_len=self._max_model_len,
            shapes=checkpoint.shapes,
            optional=checkpoint.optional,
            cpu=cpu,
            name=self._spec.name,
        )

    def _launch(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start the process of SGLang; return it and the worker's end of the connection."""
        folder = tempfile.mkdtemp(prefix="roll-sglang-")
        self._open.callback(shutil.rmtree, folder, ignore_errors=True)
        environment = engine_environment(
            self._spec.platform, self._spec.cores, self._config.tp, os.environ, folder
        )
        python = self._config.python
        if python is not None:
            have = environment.get("PYTHONPATH", "")
            environment["PYTHONPATH"] = code_path(Path(folder), have)
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            program = ["-m", "roll.strategy.sglang.server", str(fd), folder]
            server = subprocess.Popen(
                [command(python), "-W", "ignore", *program],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        self._open.push_async_callback(asyncio.to_thread, self._end, server)
        return server, ours

    def _end(self, server: subprocess.Popen[bytes]) -> None:
        """Kill the process and all below it; they hold nothing that must be saved."""
        main = psutil.Process(server.pid)
        below = {*self._processes, *children_of(main)} - {main}
        server.kill()
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        server.wait(_SHUTDOWN_S)
        psutil.wait_procs(below, _SHUTDOWN_S)
        # Python's resource tracker removes them, too, unless somebody has killed it.
        for file in self._files:
            file.unlink(missing_ok=True)


def _shared_files(processes: Collection[psutil.Process]) -> set[Path]:
    """Return SGLang's own files in /dev/shm that these processes have mapped."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            found |= {Path(line.split()[-1]) for line in lines if _OWN_FILES in line}
    return {file for file in found if file.is_absolute()}
