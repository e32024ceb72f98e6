"""The sandboxes of this process: one for each setting, made at its first use."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, Self
from weakref import WeakKeyDictionary

from pydantic import Field, model_validator

from roll.config.base import Config
from roll.config.errors import ConfigError
from roll.rewards.packages import optional_package
from roll.sandbox import Limits, Remote, Sandbox
from roll.sandbox.remote.messages import TOKEN_VARIABLE

_PARTS_OF_PYTEST = ("_pytest.assertion.rewrite", "_pytest.python", "_pytest.terminal")
"""Modules that pytest imports when it starts."""


class LimitSettings(Config):
    """Limits of one case."""

    cpu_s: float = Field(default=10.0, gt=0)
    """CPU time, which a busy machine does not use up."""
    wall_s: float | None = Field(default=None, gt=0)
    """Time of the clock, for programs that wait. Left out: 10 s and ten times `cpu_s`, so that a
    busy machine fails nobody."""
    memory_mb: float = Field(default=1024.0, gt=0)
    """Memory with Python and the preloaded modules."""

    def limits(self) -> Limits:
        """Return them as the sandbox takes them."""
        wall_s = 10 + 10 * self.cpu_s if self.wall_s is None else self.wall_s
        return Limits(cpu_s=self.cpu_s, wall_s=wall_s, memory_mb=self.memory_mb)


class RemoteSettings(Config):
    """Hosts that run programs. The token is in the environment variable ROLL_SANDBOX_TOKEN."""

    urls: tuple[str, ...] = Field(min_length=1)
    """Addresses, `http://` or `https://`. Programs go to the host that has the least to do."""
    protocol: Literal["roll", "sandbox_fusion", "piston"] = "roll"
    """`roll`: `roll sandbox serve`. The others have no sessions, so they judge by standard input
    and output, and by calls of functions."""
    patience_s: float = Field(default=120.0, gt=0)
    """How long a program waits for a host that has room or answers again."""

    @model_validator(mode="after")
    def _has_addresses(self) -> Self:
        self.remote(None)
        return self

    def remote(self, token: str | None) -> Remote:
        """Return them as the sandbox takes them."""
        return Remote(self.urls, self.protocol, token, self.patience_s)


class SandboxSettings(Config):
    """Settings of the sandbox that runs programs."""

    level: Literal["auto", "namespaces", "landlock", "strict", "remote", "none"] = "auto"
    """Level of isolation; `auto`: the strongest that passes its self-test on the machine."""
    workers: int | None = Field(default=None, ge=1)
    """Programs that run at the same time. Left out: one for each core, with `remote` as many as the
    hosts run."""
    preload: tuple[str, ...] = ()
    """Modules that programs find imported, such as `numpy`."""
    readable: tuple[str, ...] = ()
    """Further folders that programs may read and import from."""
    remote: RemoteSettings | None = None
    """Hosts of the level `remote`."""

    @model_validator(mode="after")
    def _fits_the_level(self) -> Self:
        if (self.level == "remote") != (self.remote is not None):
            raise ValueError("`remote` names the hosts of `level: remote`; write both, or neither")
        if self.remote is not None and (self.preload or self.readable):
            raise ValueError("`preload` and `readable` are options of `roll sandbox serve` here")
        return self


@dataclass(eq=False)
class OpenSandbox:
    """A sandbox, and how many programs may hold sessions of it."""

    sandbox: Sandbox
    width: int
    """Programs that run at the same time."""
    _gates: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(
        default_factory=WeakKeyDictionary
    )

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Sandbox]:
        """Yield the sandbox as soon as fewer than `width` others of this event loop judge programs
        that need sessions."""
        loop = asyncio.get_running_loop()
        gate = self._gates.setdefault(loop, asyncio.Semaphore(self.width))
        async with gate:
            yield self.sandbox


_making = threading.Lock()


async def open_sandbox(settings: SandboxSettings, *, more: tuple[str, ...] = ()) -> OpenSandbox:
    """Return the sandbox with these settings, which all rewards of this process share.

    Args:
        settings: as in the config.
        more: further folders that its programs may read.

    Raises:
        NoLevelError: the level does not work here, or with `auto` none does.
    """
    return await asyncio.to_thread(shared_sandbox, settings, more)


async def open_pytest_sandbox(settings: SandboxSettings) -> OpenSandbox:
    """Return a sandbox with the same settings that has pytest imported, for pytest files.

    Raises:
        ConfigError: pytest is missing.
        NoLevelError: see `open_sandbox`.
    """
    if settings.level == "remote":
        return await open_sandbox(settings)  # whose programs import it; a host may preload it
    optional_package("pytest", "pytest", "pytest files are run")
    preload = tuple(dict.fromkeys((*settings.preload, "pytest", *_PARTS_OF_PYTEST)))
    opened: OpenSandbox = await open_sandbox(
        settings.model_copy(update={"workers": 1, "preload": preload})
    )
    if opened.sandbox.level == "strict":
        raise ConfigError("sandbox.level: pytest opens files, which `strict` refuses")
    return opened


def shared_sandbox(settings: SandboxSettings, more: tuple[str, ...] = ()) -> OpenSandbox:
    """Return what `open_sandbox` does, which raises the same, to callers without an event loop."""
    with _making:
        return _opened(settings, more)


@functools.cache
def _opened(settings: SandboxSettings, more: tuple[str, ...]) -> OpenSandbox:
    """Return the sandbox with these settings, made once in each process, and the number of programs
    that it runs at a time."""
    sandbox = new_sandbox(settings, more=more)
    return OpenSandbox(sandbox, sandbox.width)


def new_sandbox(settings: SandboxSettings, *, more: tuple[str, ...] = ()) -> Sandbox:
    """Return a sandbox with these settings, which whoever asks for it closes.

    Args:
        settings: as in the config.
        more: further folders that its programs may read.

    Raises:
        NoLevelError: see `open_sandbox`.
    """
    hosts = settings.remote
    return Sandbox(
        settings.level,
        workers=settings.workers,
        preload=settings.preload,
        readable=(*settings.readable, *more),
        remote=None if hosts is None else hosts.remote(os.environ.get(TOKEN_VARIABLE)),
    )
