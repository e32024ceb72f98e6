"""Sandboxes behind HTTP, in threads of the test: `roll sandbox serve`, and services of others."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from roll.commands.sandbox_serve import SandboxServer
from roll.core.threads.loop_thread import LoopThread
from roll.sandbox import Sandbox

TOKEN = "a-token-of-the-tests-0123456789"


class Served:
    """A server that can be stopped before its time."""

    def __init__(self, loop: LoopThread, server: SandboxServer) -> None:
        self.loop, self.server, self.url = loop, server, ""

    async def start(self) -> None:
        self._runner = web.AppRunner(
            self.server.app(), shutdown_timeout=0.1, handler_cancellation=True
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    def stop(self) -> None:
        """Stop answering; a second call does nothing."""
        self.loop.run(self._runner.cleanup())


@contextmanager
def served(sandbox: Sandbox, **options: Any) -> Iterator[Served]:
    """Serve a sandbox in a thread of its own."""
    given = {"queue": 16, "most_sessions": 8} | options
    with LoopThread("sandbox") as loop:

        async def begin() -> Served:
            made = Served(loop, SandboxServer(sandbox, TOKEN, **given))
            await made.start()
            return made

        running = loop.run(begin())
        try:
            yield running
        finally:
            running.stop()


async def _python(
    code: str, stdin: str, files: dict[str, bytes], timeout_s: float
) -> tuple[int | None, str, str]:
    """Run Python as these services do: a process with a limit of the clock."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        try:
            done = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-c", code],
                input=stdin,
                capture_output=True,
                text=True,
                cwd=folder,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return None, "", ""
    return done.returncode, done.stdout, done.stderr


async def as_sandbox_fusion(request: web.Request) -> web.Response:
    """Answer as SandboxFusion's server does (`sandbox/server/sandbox_api.py`)."""
    asked = await request.json()
    if request.path != "/run_code" or asked["language"] != "python":
        return web.json_response({"detail": "Not Found"}, status=404)
    files = {name: base64.b64decode(each) for name, each in asked["files"].items()}
    code, out, err = await _python(asked["code"], asked["stdin"], files, asked["run_timeout"])
    ran = {"status": "Finished", "execution_time": 0.1, "return_code": code}
    if code is None:
        ran = {"status": "TimeLimitExceeded", "execution_time": None, "return_code": None}
    status = "Success" if code == 0 else "Failed"
    if "no room on the disk" in asked["code"]:
        status, ran = "SandboxError", {"status": "Error"}
    return web.json_response(
        {
            "status": status,
            "message": "the disk is full" if status == "SandboxError" else "",
            "compile_result": None,
            "run_result": {**ran, "stdout": out, "stderr": err},
            "executor_pod_name": None,
            "files": {},
        }
    )


async def as_piston(request: web.Request) -> web.Response:
    """Answer as Piston's server does (`docs/api-v2.md`), with 30 s as the longest time."""
    asked = await request.json()
    if request.path != "/api/v2/execute":
        return web.json_response({"message": "Not Found"}, status=404)
    if asked["run_timeout"] > 30_000:
        told = "run_timeout cannot exceed the configured limit of 30000"
        return web.json_response({"message": told}, status=400)
    program, *others = asked["files"]
    files = {each["name"]: base64.b64decode(each["content"]) for each in others}
    limit_s = asked["run_timeout"] / 1000
    code, out, err = await _python(program["content"], asked["stdin"], files, limit_s)
    by = {None: "SIGKILL", -24: "SIGXCPU", -9: "SIGKILL"}.get(code)
    ran = {"stdout": out, "stderr": err, "output": out + err, "signal": by}
    result: dict[str, Any] = {**ran, "code": code if by is None else None}
    return web.json_response({"run": result, "language": "python", "version": "3.12.0"})
