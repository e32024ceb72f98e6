"""Sandboxes behind HTTP, in threads of the test: `roll sandbox serve`, and services of others."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


_LANGUAGES: dict[str, tuple[str, list[str], list[str]]] = {
    "python": ("main.py", [], [sys.executable, "main.py"]),
    "bash": ("main.sh", [], ["bash", "main.sh"]),
    "cpp": ("main.cpp", ["g++", "main.cpp", "-o", "main"], ["./main"]),
}
"""Name of the file, command that compiles it, command that runs it."""


@dataclass(frozen=True)
class _Ran:
    """The end of a process; the code None: at the limit of the clock."""

    code: int | None
    out: str
    err: str


async def _ran(
    language: str, code: str, stdin: str, files: dict[str, bytes], timeout_s: float
) -> tuple[_Ran | None, _Ran | None]:
    """Compile and run a program as these services do: processes with a limit of the clock. A
    program that is not compiled is not run."""
    file, build, run = _LANGUAGES[language]
    with tempfile.TemporaryDirectory() as folder:
        for name, content in {**files, file: code.encode()}.items():
            Path(folder, name).write_bytes(content)
        built = await _process(build, "", folder, 60) if build else None
        if built is not None and built.code != 0:
            return built, None
        return built, await _process(run, stdin, folder, timeout_s)


async def _process(command: list[str], stdin: str, folder: str, timeout_s: float) -> _Ran:
    try:
        done = await asyncio.to_thread(
            subprocess.run,
            command,
            input=stdin,
            capture_output=True,
            text=True,
            cwd=folder,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return _Ran(None, "", "")
    return _Ran(done.returncode, done.stdout, done.stderr)


async def as_sandbox_fusion(request: web.Request) -> web.Response:
    """Answer as SandboxFusion's server does (`sandbox/server/sandbox_api.py`)."""
    asked = await request.json()
    if request.path != "/run_code" or asked["language"] not in _LANGUAGES:
        return web.json_response({"detail": "Not Found"}, status=404)
    files = {name: base64.b64decode(each) for name, each in asked["files"].items()}
    built, ran = await _ran(
        asked["language"], asked["code"], asked["stdin"], files, asked["run_timeout"]
    )
    status = "Success" if ran is not None and ran.code == 0 else "Failed"
    told = _of_sandbox_fusion(ran)
    if "no room on the disk" in asked["code"]:
        status, told = "SandboxError", {"status": "Error"}
    return web.json_response(
        {
            "status": status,
            "message": "the disk is full" if status == "SandboxError" else "",
            "compile_result": _of_sandbox_fusion(built),
            "run_result": told,
            "executor_pod_name": None,
            "files": {},
        }
    )


def _of_sandbox_fusion(ran: _Ran | None) -> dict[str, Any] | None:
    if ran is None:
        return None
    told: dict[str, Any] = {"status": "Finished", "execution_time": 0.1, "return_code": ran.code}
    if ran.code is None:
        told = {"status": "TimeLimitExceeded", "execution_time": None, "return_code": None}
    return {**told, "stdout": ran.out, "stderr": ran.err}


async def as_piston(request: web.Request) -> web.Response:
    """Answer as Piston's server does (`docs/api-v2.md`), with 30 s as the longest time."""
    asked = await request.json()
    if request.path != "/api/v2/execute":
        return web.json_response({"message": "Not Found"}, status=404)
    language = {"c++": "cpp"}.get(asked["language"], asked["language"])
    if language not in _LANGUAGES:
        told = f"{asked['language']}-{asked['version']} runtime is unknown"
        return web.json_response({"message": told}, status=400)
    if asked["run_timeout"] > 30_000:
        told = "run_timeout cannot exceed the configured limit of 30000"
        return web.json_response({"message": told}, status=400)
    program, *others = asked["files"]
    files = {each["name"]: base64.b64decode(each["content"]) for each in others}
    limit_s = asked["run_timeout"] / 1000
    built, ran = await _ran(language, program["content"], asked["stdin"], files, limit_s)
    stages = {"compile": built, "run": ran}
    result = {name: _of_piston(each) for name, each in stages.items() if each is not None}
    return web.json_response({**result, "language": asked["language"], "version": "1.0.0"})


def _of_piston(ran: _Ran) -> dict[str, Any]:
    by = {None: "SIGKILL", -24: "SIGXCPU", -9: "SIGKILL"}.get(ran.code)
    told = {"stdout": ran.out, "stderr": ran.err, "output": ran.out + ran.err, "signal": by}
    return {**told, "code": ran.code if by is None else None}
