"""`terminal`: mend a program with commands of a shell until its tests pass."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roll.envs.built_in.code.fix_code import BLOCK, FixCode
from roll.envs.tools.api import Tool, ToolError
from roll.envs.tools.built_in.sandboxed import SandboxKit
from roll.envs.tools.cutting import cut_to

FILE = "program.py"
COMMAND_S = 10.0
"""Time of a command. A command, reading the program and its tests together must take less than
`step_timeout_s` of an environment: at that limit the episode fails, and no policy learns from
it."""


class Terminal:
    """Folder with a program that has a mistake, and a shell in it. A turn is a command, or holds
    one in a block of code; the last block counts. After each turn that has changed the program its
    tests run, in a sandbox of their own, which the shell does not reach. A command that takes
    longer than `COMMAND_S` is ended, and the folder with it: the policy is told, and finds the
    files of the task again.

    The reward is 1 when all tests pass, 0 before. Tasks are those of `fix_code`; a data row may
    also have the column `files` (contents by path).

    Args:
        tests: number of tests, in tasks of seeds.
        hidden: share of the tests that are never shown.
        level: level of the sandbox: `namespaces`, or `none` if the policy is trusted; `auto` takes
            the strongest that there is.
        remote: hosts of the level `remote`: `{urls: [...]}`.
        cpu_s: CPU time of the tests of one turn, in seconds.
        memory_mb: memory of them.
        shown: number of tokens of what a command prints that are shown, of about four characters.
        rules: explain the task in the first observation.
    """

    def __init__(
        self,
        tests: int = 8,
        hidden: float = 0.5,
        level: str = "auto",
        cpu_s: float = 3.0,
        memory_mb: float = 256.0,
        shown: int = 256,
        rules: bool = True,
        remote: Mapping[str, Any] | None = None,
    ) -> None:
        """Take the arguments, which the class describes; errors are those of `fix_code` and of the
        tool `shell`."""
        self._tests = FixCode(tests, hidden, level, cpu_s, memory_mb, rules=False, remote=remote)
        # Shorter than those of `fix_code`, where no command has taken a part of the step before.
        self._tests.limits = replace(self._tests.limits, wall_s=6 + 3 * cpu_s)
        limits = {"wall_s": COMMAND_S, "cpu_s": COMMAND_S}
        self._kit = SandboxKit(("shell", "files"), level=level, limits=limits, remote=remote)
        self._shown, self._rules = shown, rules
        self._tools: dict[str, Tool] = {}
        self._code = self._verdict = ""
        self._won = False
        self._invalid = 0

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        row = options or {}
        await asyncio.to_thread(self._tests.reset, seed=seed, options=row)
        files = {**(row.get("files") or {}), FILE: self._tests.task.code}
        self._code = self._tests.task.code.rstrip("\n")
        self._tools = {tool.name: tool for tool in await self._kit.open({"files": files})}
        rules = (
            f"The file {FILE} has a mistake. Mend it: each turn is one command for /bin/sh, in a "
            "block that begins with ```sh and ends with ```. Tests run when the file has changed.\n"
        )
        task = f"Tests call `{self._tests.task.entry}` of {FILE}."
        return (rules if self._rules else "") + task, self._info()

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        blocks = BLOCK.findall(action)
        command = (blocks[-1] if blocks else action).strip().replace("\0", "")
        if not command:
            self._invalid += 1
            return "There is no command.", 0.0, False, False, self._info()
        printed = cut_to(await self._run(command), self._shown, None)
        code, note = await self._read()
        if code != self._code:
            self._code = code
            self._verdict, self._won = await asyncio.to_thread(self._tests.judge, code)
        said = "\n".join(filter(None, (printed, note, self._verdict)))
        return said, float(self._won), self._won, False, self._info()

    async def close(self) -> None:
        """End the shell and all that it has started."""
        await self._kit.close()

    async def _run(self, command: str) -> str:
        """Return what a command prints, also of one that is ended."""
        try:
            return str(await self._tools["shell"].call({"command": command}))
        except ToolError as error:
            return str(error)

    async def _read(self) -> tuple[str, str]:
        """Return the program, and what the policy has to know about its file: that it is that of
        the task again, or why it cannot be read. The program is empty then."""
        try:
            code, note = await self._kit.read(FILE)
        except ToolError as error:
            return "", f"{FILE} cannot be read: {str(error).rpartition(chr(10))[2]}"
        return code.rstrip("\n"), note

    def _info(self) -> dict[str, Any]:
        """Return the `info` of `fix_code`; `state` is the program."""
        return {**self._tests.info(), "invalid": self._invalid, "state": self._code}
