"""HTTP services of tests: real servers in the process of the test."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web

from roll.core.threads.loop_thread import LoopThread

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Serve all POSTs by `handler`; yield the address, without a path."""
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


class ScriptedJudge:
    """An OpenAI-compatible server whose answers a function gives."""

    def __init__(self, say: Callable[[str], str]) -> None:
        self.say = say
        """Function that returns the answer to a message."""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []

    @property
    def messages(self) -> list[str]:
        """Messages that came, in order."""
        return [body["messages"][0]["content"] for body in self.bodies]

    async def answer(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        text = self.say(body["messages"][0]["content"])
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 100, "completion_tokens": 20}
        return web.json_response({"choices": [choice], "usage": usage})


@contextmanager
def serving_beside(handler: Handler) -> Iterator[str]:
    """Serve as `serving` does, in a thread of its own."""
    with LoopThread("service") as loop:
        service = serving(handler)
        url = loop.run(service.__aenter__())
        try:
            yield url
        finally:
            loop.run(service.__aexit__(None, None, None))
