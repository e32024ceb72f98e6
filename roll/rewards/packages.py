"""Import of packages that only some rewards need."""

from __future__ import annotations

import importlib
from typing import Any

from roll.core.errors import ConfigError


def optional_package(module: str, package: str, purpose: str) -> Any:
    """Import and return a module of an optional package.

    Args:
        module: name of the module.
        package: name of the package that has the module, for the message.
        purpose: end of the sentence "without it no ...", such as "sentences are counted".

    Raises:
        ConfigError: the package is missing; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0]:
            raise
        raise ConfigError(
            f"the package {package!r} is missing; without it no {purpose}. Install it "
            f"(pip install {package}), or all packages for rewards (pip install 'roll[rewards]')"
        ) from None
