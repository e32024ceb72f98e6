"""The tools `python`, `shell` and `files`: one session in the sandbox for each episode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from pydantic import ValidationError

from roll.core.errors import ConfigError, EnvironmentFailedError
from roll.envs.tools.api import Tool, ToolError
from roll.envs.tools.functions import tool_of
from roll.rewards.code.running.sandboxes import SandboxSettings, shared_sandbox
from roll.sandbox import Limits, NoLevelError, Outcome, Sandbox, SandboxError, Session, Status

SANDBOXED = ("python", "shell", "files")
"""Names of these tools; `files` stands for three: read_file, write_file, list_files."""
_NEW_SESSION = "[a new session: earlier variables and files are lost]\n"
"""Note for the policy before what the first program of a further session prints."""
_SHELL = (
    "(lambda code: print(f'[exit code {{code}}]') if code else None)(__import__('subprocess').run("
    "['/bin/sh', '-c', {command!r}], stdin=-3).returncode)"
)
_READ = "print(open({path!r}, encoding='utf-8', errors='replace').read(), end='')"
_WRITE = (
    "(lambda os: os.makedirs(os.path.dirname({path!r}) or '.', exist_ok=True))(__import__('os'))\n"
    "print(open({path!r}, 'w', encoding='utf-8').write({content!r}), 'characters written')"
)
_LIST = (
    "print('\\n'.join(sorted(__import__('os').path.relpath(__import__('os').path.join(folder, each)"
    ", {path!r}) for folder, _, each_files in __import__('os').walk({path!r}) "
    "for each in each_files)) or 'no files')"
)
_WITH_FILES = ("namespaces", "none")
"""Levels at which programs start processes and write files."""


@dataclass
class SandboxKit:
    """Tools of one episode that run in the sandbox. They share one session: what one of them
    leaves behind, the others find. A session that reaches a limit ends, and the next call begins a
    new one; the policy is told."""

    names: Sequence[str]
    """Those of `SANDBOXED` that the episode has."""
    level: str = "auto"
    """Level of isolation; see `roll.sandbox`."""
    preload: Sequence[str] = ()
    """Modules that programs find imported, such as numpy."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Limits other than the defaults; see `roll.sandbox.Limits`."""
    remote: Mapping[str, Any] | None = None
    """Hosts of the level `remote`; see `RemoteSettings`."""
    _session: Session | None = field(default=None, init=False)
    _files: Mapping[str, str] = field(default_factory=dict, init=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _lost: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Raise ConfigError for limits that are unknown or no limits, a level that does not exist,
        or hosts that keep no sessions."""
        try:
            Limits(**self.limits)  # type: ignore[arg-type]  # `Limits` checks the types
        except (TypeError, ValueError) as error:
            raise ConfigError(f"sandbox.limits: {error}") from None
        self._settings = settings_of(self.level, self.remote, preload=[*self.preload], workers=1)
        hosts = self._settings.remote
        if hosts is not None and hosts.protocol != "roll":
            raise ConfigError(
                f"sandbox.remote.protocol: {hosts.protocol} has no sessions, which the tools "
                f"{', '.join(self.names)} need; use hosts of `roll sandbox serve`"
            )

    async def open(self, options: Mapping[str, Any]) -> Sequence[Tool]:
        """Return the tools. The session begins with the first call, with the files of the column
        `files` (contents by path) if the row has one.

        ConfigError if the level does not work, or does not allow these tools;
        EnvironmentFailedError if the column has another form.
        """
        sandbox = await asyncio.to_thread(sandbox_of, self._settings)
        _check_level(sandbox, [each for each in self.names if each != "python"])
        files = options.get("files") or {}
        if not isinstance(files, Mapping):
            raise EnvironmentFailedError("the column `files` must map paths to contents")
        # Files of Parquet have all paths of all rows: null where a row has none.
        held = {path: content for path, content in files.items() if content is not None}
        self._files = {str(path): str(content) for path, content in held.items()}
        return [tool for name in self.names for tool in self._tools(name)]

    async def close(self) -> None:
        """End the session and all that it has started."""
        session, self._session = self._session, None
        if session is not None:
            await session.__aexit__()

    def _tools(self, name: str) -> list[Tool]:
        """Return the tools of one name of SANDBOXED. The policy reads the docstrings of the
        functions."""

        async def python(code: str) -> str:
            """Runs Python code and returns what it prints, and the value of its last line.
            Variables stay from call to call.

            Args:
                code: the code to run.
            """
            return await self._run(code)

        async def shell(command: str) -> str:
            """Runs a shell command and returns what it prints.

            Args:
                command: the command, for /bin/sh.
            """
            return await self._run(_SHELL.format(command=command))

        async def read_file(path: str) -> str:
            """Returns the content of a file.

            Args:
                path: path of the file.
            """
            return await self._run(_READ.format(path=path))

        async def write_file(path: str, content: str) -> str:
            """Writes a file; replaces it if it exists.

            Args:
                path: path of the file.
                content: the whole content.
            """
            return await self._run(_WRITE.format(path=path, content=content))

        async def list_files(path: str = ".") -> str:
            """Lists the files of a folder and of the folders in it.

            Args:
                path: path of the folder.
            """
            return await self._run(_LIST.format(path=path))

        functions: dict[str, list[Callable[..., Any]]] = {
            "python": [python],
            "shell": [shell],
            "files": [read_file, write_file, list_files],
        }
        return [tool_of(function) for function in functions[name]]

    async def read(self, path: str) -> tuple[str, str]:
        """Return the content of a file, for a program that needs it as it is, and apart from it the
        note for the policy; the note is empty unless a session has begun anew.

        Raises:
            ToolError: it cannot be read; the message is for the policy, with the note.
            EnvironmentFailedError: the sandbox does not work.
        """
        note, outcome = await self._outcome(_READ.format(path=path))
        if not outcome.ok:
            raise ToolError(note + _said(outcome))
        return outcome.stdout, note.rstrip("\n")

    async def _run(self, program: str) -> str:
        """Return what a program prints in the session of the episode, and the note of a new one.

        Raises:
            ToolError: it failed; the message is what it printed.
            EnvironmentFailedError: the sandbox does not work.
        """
        note, outcome = await self._outcome(program)
        if outcome.ok:
            return note + (_said(outcome) or "[nothing printed]")
        raise ToolError(note + _said(outcome))

    async def _outcome(self, program: str) -> tuple[str, Outcome]:
        """Run a program in the session of the episode; begin one if there is none. Return a note if
        it is not the first, and the outcome; EnvironmentFailedError if the sandbox does not
        work."""
        async with self._lock:
            try:
                note = ""
                if self._session is None or not self._session.open:
                    note = _NEW_SESSION if self._lost else ""
                    await self._begin()
                assert self._session is not None
                return note, await self._session.run(program)
            except SandboxError as error:
                raise EnvironmentFailedError(f"the sandbox does not work: {error}") from None
            finally:  # also when the caller's time limit cancels the call, which ends the session
                self._lost = self._lost or (self._session is not None and not self._session.open)

    async def _begin(self) -> None:
        """Begin a new session and write the task's files into it; EnvironmentFailedError if a path
        leaves the folder or cannot be written."""
        limits = Limits(**self.limits)  # type: ignore[arg-type]  # checked when this was made
        session = sandbox_of(self._settings).session(limits)
        await session.__aenter__()
        self._session = session
        for path, content in self._files.items():
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                raise EnvironmentFailedError(f"files: {path!r} is no path below the folder")
            written = await session.run(_WRITE.format(path=path, content=content))
            if not written.ok:
                raise EnvironmentFailedError(f"files: {path!r}: {_said(written)}")


def _said(outcome: Outcome) -> str:
    """Return what a program printed, and how it ended unless it ended well."""
    said = "\n".join(filter(None, (outcome.stdout.rstrip("\n"), outcome.stderr.rstrip("\n"))))
    if outcome.cut:
        said += "\n[it printed more]"
    if outcome.status in (Status.OK, Status.FAILED) and (said or outcome.ok):
        return said
    return f"{said}\n[{outcome.reason}]".strip()


def _check_level(sandbox: Sandbox, names: Sequence[str]) -> None:
    """Raise ConfigError if tools that start processes or write files cannot do so here, or at one
    of the hosts."""
    places = sandbox.host_levels or {"this machine": sandbox.level}
    for place, level in places.items():
        if names and level not in _WITH_FILES:
            raise ConfigError(
                f"the tools {', '.join(names)} need the level `namespaces` of the sandbox, and "
                f"{place} has `{level}` ({sandbox.refused.get('namespaces', '')}); "
                "leave them out, or set `sandbox: {level: none}` if you trust the policy"
            )


def settings_of(level: str, remote: Mapping[str, Any] | None, **more: Any) -> SandboxSettings:
    """Return the settings of a sandbox; ConfigError if there is no such level, or no such hosts."""
    given = {"level": level, "remote": remote, **more}
    try:
        return SandboxSettings.model_validate_json(json.dumps(given))
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise ConfigError(f"sandbox: {where}{first['msg']}") from None


def sandbox_of(settings: SandboxSettings) -> Sandbox:
    """Return the sandbox of this process with these settings; start it if there is none.

    Raises:
        ConfigError: the level does not work on this machine, or no host answers.
    """
    try:
        return shared_sandbox(settings).sandbox
    except (NoLevelError, ValueError) as error:
        raise ConfigError(f"sandbox: {error}") from None
