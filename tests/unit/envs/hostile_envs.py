"""Environments that do wrong, for processes of their own; they need nothing but Python."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Guess:
    """Game whose dice are those of its process, as in many packages."""

    def __init__(self, most: int = 1000) -> None:
        self.most = most

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        random.seed(seed)
        return f"number {random.randint(1, self.most)}", {"pid": os.getpid(), "state": "new"}

    def step(self, action: str) -> Any:
        return f"{action} {random.randint(1, self.most)}", 0.5, action == "stop", False, {"n": 1}

    def close(self) -> None:
        pass


class Waiting(Guess):
    """The same, `async`."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)

    async def step(self, action: str) -> Any:
        return super().step(action)

    async def close(self) -> None:  # type: ignore[override]
        pass


class Hostile(Guess):
    """Does what its turn says."""

    def __init__(self, folder: str = "") -> None:
        super().__init__()
        self.folder = folder

    def step(self, action: str) -> Any:
        if action == "raise":
            raise ValueError("the board is broken")
        if action == "leave":
            sys.exit(3)
        if action == "hang":
            time.sleep(600)
        if action == "loop":
            while True:
                pass
        if action == "leak":
            self.kept = [bytearray(64 * 2**20) for _ in range(64)]
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "crash":
            os.abort()
        if action == "shout":
            return "x" * 10 * 2**20, 0.0, False, False, {}
        if action == "object":
            return object(), 0.0, False, False, {}
        if action == "print":
            print("hello", flush=True)  # noqa: T201
        if action == "child":
            child = subprocess.Popen(["sleep", "600"])
            Path(self.folder, "pid").write_text(str(child.pid))
        return super().step(action)


class Told:
    """What an environment of a role `tool` would say: as `roll.core.types.Message`."""

    role, content, name, call_id, parts = "tool", "42", "add", "c1", ()


class Telling:
    """Gives all that a run reads in `info`."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        schema = {"type": "object", "properties": {"n": {"type": ["integer", "null"]}}}
        tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
        return "begin", {"seat": 0, "tools": [tool], "state": (1, 2), "board": object()}

    def step(self, action: Any) -> Any:
        info = {"rewards": {1: -1.0}, "state": "x" * 5000, "cut": action.cut, "long": "y" * 5000}
        return [Told()], 1.0, False, False, info

    def close(self) -> None:
        pass


class Slow(Guess):
    """Takes long to be closed."""

    def close(self) -> None:
        time.sleep(600)


def broken() -> Any:
    raise OSError("no board in the box")
