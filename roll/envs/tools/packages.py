"""Packages that only some tools need, and their import."""

from __future__ import annotations

import importlib
from typing import Any

from roll.core.errors import ConfigError


def agent_package(module: str, package: str, tool: str) -> Any:
    """Import and return a module of a package of `requirements/agents.txt`.

    Args:
        module: name of the module.
        package: name of the package that has the module, for the message.
        tool: name of the tool that needs it, for the message.

    Raises:
        ConfigError: the package is missing; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0]:
            raise
        raise ConfigError(
            f"the tool {tool!r} needs the package {package!r}, which is missing. Install it "
            f"(pip install {package}), or all packages for agents (pip install 'roll[agents]')"
        ) from None
