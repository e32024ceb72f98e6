"""Tools of an environment, as its config names them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from roll.config.errors import nearest
from roll.config.user_code.import_path import load_object
from roll.core.errors import ConfigError
from roll.envs.tools.api import Stateless, Tool, Toolkit
from roll.envs.tools.built_in.calculator import calculator
from roll.envs.tools.built_in.finish import finish
from roll.envs.tools.built_in.sandboxed import SANDBOXED, SandboxKit
from roll.envs.tools.built_in.search import SearchKit
from roll.envs.tools.functions import tool_of
from roll.envs.tools.mcp_servers import McpKit, server_of

NAMES = (*SANDBOXED, "calculator", "finish", "search", "mcp")
"""Names of the built-in tools."""


def load_kits(
    entries: Sequence[str | Mapping[str, Any]], sandbox: Mapping[str, Any]
) -> list[Callable[[], Toolkit]]:
    """Return functions that make the toolkits of an episode.

    Args:
        entries: tools: the name of a built-in one; `{name: settings}`; or an import path
            `package.module:name` of a function, a `Tool`, or a class that is a `Toolkit`.
        sandbox: settings of the sandbox; see `SandboxKit`.

    Raises:
        ConfigError: a tool does not exist, or does not take its settings.
    """
    kits: list[Callable[[], Toolkit]] = []
    sandboxed: list[str] = []
    for entry in entries:
        name, settings = _named(entry)
        if name in SANDBOXED:
            if settings:
                raise ConfigError(f"tools: {name} takes no settings; set `sandbox` instead")
            sandboxed.append(name)
        elif name == "mcp":
            kits.append(partial(McpKit, server_of(settings)))
        elif name == "search":
            make = _made("search", SearchKit, settings)
            make()  # refuses settings that do not go together
            kits.append(make)
        elif name in ("calculator", "finish"):
            _made(name, lambda: None, settings)  # they take none
            tool = tool_of(calculator) if name == "calculator" else tool_of(finish, ends=True)
            kits.append(partial(Stateless, (tool,)))
        elif ":" in name:
            kits.append(_of_user(name, settings))
        else:
            raise ConfigError(
                f"tools: unknown tool {name!r}{nearest(name, NAMES)} (built in: "
                f"{', '.join(NAMES)}; one of your own reads 'package.module:function')"
            )
    if sandboxed:
        kits.insert(0, _made("sandbox", SandboxKit, {**sandbox, "names": tuple(sandboxed)}))
    elif sandbox:
        raise ConfigError(f"sandbox: none of the tools runs there ({', '.join(SANDBOXED)} do)")
    return kits


def _named(entry: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the settings of an entry; ConfigError if it has another form."""
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((name, settings),) = entry.items()
        if isinstance(settings, Mapping | None):
            return str(name), settings or {}
    raise ConfigError(f"tools: expected a name, or {{name: settings}}, found {entry!r:.80}")


def _made(name: str, kit: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that makes a kit with settings; ConfigError if it does not take them."""
    try:
        inspect.signature(kit).bind(**settings)
    except TypeError as error:
        known = [each for each in inspect.signature(kit).parameters if each != "names"]
        raise ConfigError(f"{name}: {error} (settings: {', '.join(known) or 'none'})") from None
    return partial(kit, **settings)


def _of_user(path: str, settings: Mapping[str, Any]) -> Callable[[], Toolkit]:
    """Return a function that makes the kit of a user's function, tool or toolkit.

    ConfigError if there is none at `path`, or if it does not take the settings.
    """
    found = load_object(path)
    if isinstance(found, Tool):
        _made(path, lambda: None, settings)
        return partial(Stateless, (found,))
    if inspect.isclass(found) and callable(getattr(found, "open", None)):
        return _made(path, found, settings)
    if not callable(found) or inspect.isclass(found):
        raise ConfigError(
            f"tools: {path} is a {type(found).__name__}; expected a function, a Tool, or a class "
            "with `open` and `close`"
        )
    _made(path, lambda: None, settings)
    return partial(Stateless, (tool_of(found),))
