"""`ADAPTERS`: adapters by the prefix of `env`; imports none of their packages."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from roll.config.sections.environment import EnvironmentConfig
from roll.core.errors import ConfigError
from roll.envs.adapters import packages

SERVERS = "roll.envs.adapters.servers"


@dataclass(frozen=True, slots=True)
class Adapter:
    """Adapter of a package, or of servers of one kind.

    Its module has a function `prepare(name, kwargs, **settings)`, which returns the function that
    makes the environment of one episode.
    """

    module: str
    """Name of the module, below `packages` or `servers`."""
    package: str
    """Package on the package index that it needs; of a server, that of the client."""
    example: str
    """Value of `env`."""
    server: bool = False
    """True if the environment lives behind a server."""
    process: bool = False
    """True if each episode needs a process of its own, because the package has one random state per
    process."""

    def import_module(self) -> Any:
        """Import and return the module of the adapter, without its package."""
        folder = SERVERS if self.server else packages.__name__
        return importlib.import_module(f"{folder}.{self.module}")

    @property
    def version(self) -> str | None:
        """Installed version of the package; None if it is missing."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None


ADAPTERS = {
    "gymnasium": Adapter("gymnasium", "gymnasium", "gymnasium:FrozenLake-v1"),
    "textarena": Adapter("textarena", "textarena", "textarena:GuessTheNumber-v0", process=True),
    "gem": Adapter("gem", "gem-llm", "gem:game:GuessTheNumber-v0-easy", process=True),
    "skyrl_gym": Adapter("skyrl_gym", "skyrl-gym", "skyrl_gym:gsm8k", process=True),
    "verifiers": Adapter("verifiers", "verifiers", "verifiers:wordle", process=True),
    "openenv": Adapter("openenv", "aiohttp", "openenv:http://localhost:8000", server=True),
    "nemo_gym": Adapter("nemo_gym", "aiohttp", "nemo_gym:http://localhost:8000", server=True),
    "http": Adapter("http", "aiohttp", "http://localhost:8000", server=True),
    "https": Adapter("http", "aiohttp", "https://example.com/game", server=True),
}
"""Adapters by prefix."""


def adapter_of(env: str) -> tuple[Adapter, str] | None:
    """Return the adapter of a value of `env`, and the name that it gets; None if it has none."""
    prefix, colon, name = env.partition(":")
    adapter = ADAPTERS.get(prefix)
    if not colon or adapter is None:
        return None
    return adapter, env if name.startswith("//") else name


def check_adapter(where: str, config: EnvironmentConfig) -> None:
    """Raise ConfigError for an adapter that certainly cannot work here; import no package.

    Args:
        where: key of the environment in the config.
        config: settings of an environment that has an adapter.
    """
    found = adapter_of(config.what)
    assert found is not None, config.what
    adapter, name = found
    prefix = config.what.partition(":")[0]
    if not name:
        raise ConfigError(
            f"{where}.env: {config.what!r} has no name; for example {adapter.example}"
        )
    check_settings(f"{where}.adapter", adapter, config.adapter)
    for key in ("python", "process"):
        if adapter.server and getattr(config, key):
            raise ConfigError(f"{where}.{key}: {prefix} asks a server; drop `{key}`")
    if config.python is None and adapter.version is None:
        advice = "" if adapter.server else ", or set `python` to an interpreter that has it"
        raise ConfigError(
            f"{where}.env: the package {adapter.package!r} is missing; install it (pip install "
            f"{adapter.package}){advice}"
        )


def check_settings(where: str, adapter: Adapter, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting that the adapter does not know."""
    known = list(inspect.signature(adapter.import_module().prepare).parameters)[2:]
    for key in settings:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r} (known: {', '.join(known) or 'none'})")


def spec_of(adapter: Adapter, name: str, config: EnvironmentConfig) -> dict[str, Any]:
    """Return what the process of an environment loads; see `processes.child_main.load`."""
    return {
        "package": str(Path(packages.__file__).parent),
        "module": adapter.module,
        "args": [name, dict(config.kwargs)],
        "kwargs": dict(config.adapter),
        "paths": paths_of_user(),
    }


def paths_of_user() -> list[str]:
    """Return the folders of `sys.path` that do not belong to the interpreter."""
    own = {str(Path(each).resolve()) for each in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    found = [str(Path(path).resolve()) for path in sys.path]  # "" is the working directory
    return [path for path in found if not any(path.startswith(f"{each}/") for each in own)]
