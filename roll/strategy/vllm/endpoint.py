"""vLLM's own OpenAI-compatible server, for an engine that this process already owns."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from roll.config.sections.engines import EndpointConfig
from roll.core.errors import EngineError

_STOP_S = 5.0


class Endpoint:
    """Server of `/v1/completions`, `/v1/chat/completions` and vLLM's other routes.

    Its requests share the engine with those of the framework. They pause while weights are replaced
    and continue with the new ones.

    Args:
        replica: number of this replica; the server listens on `config.port + replica`.
    """

    def __init__(self, config: EndpointConfig, *, replica: int) -> None:
        self._config = config
        self._port = config.port + replica
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, engine: Any, model: str) -> None:
        """Start the server; return when it accepts requests.

        Args:
            engine: vLLM's `AsyncLLM`.
            model: name or path of the model with which `engine` was made.

        Raises:
            EngineError: the port is taken, or the server ended at once.
        """
        listener = self._listen()
        try:
            await self._serve(listener, engine, model)
        except BaseException:
            listener.close()
            raise

    async def _serve(self, listener: socket.socket, engine: Any, model: str) -> None:
        """Start the server on a socket; see `start`."""
        import uvicorn
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.entrypoints.launchers.launcher import NoSignalServer
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(
            ["--model", model, "--served-model-name", self._config.model_name]
        )
        arguments.disable_log_stats = True
        tasks = await engine.get_supported_tasks()
        app = build_app(arguments, tasks, engine.model_config)
        await init_app_state(engine, app.state, arguments, tasks)
        # lifespan="off": vLLM's own would freeze this process's heap (`gc.freeze`).
        settings = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off")
        self._server = NoSignalServer(settings)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise EngineError(f"the endpoint on port {self._port} ended as it started")
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Accept no more requests, and give those under way `_STOP_S` seconds to end."""
        if self._serving is None:
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait([self._serving], timeout=_STOP_S)
        if not done:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        self._serving = None

    def _listen(self) -> socket.socket:
        """Return a socket bound to the endpoint's port; EngineError: it cannot be bound."""
        family = socket.AF_INET6 if ":" in self._config.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self._config.host, self._port))
        except OSError as error:
            listener.close()
            raise EngineError(
                f"the endpoint cannot listen on {self._config.host}:{self._port} "
                f"({error.strerror}); set another actor_infer.strategy.endpoint.port"
            ) from error
        return listener
