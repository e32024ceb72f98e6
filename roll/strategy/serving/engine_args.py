"""A check of `engine_args`: refuses arguments that are unknown or that follow from the config."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from roll.config.errors import nearest
from roll.core.errors import ConfigError, EngineMissingError


def check_engine_args(
    names: Iterable[str],
    *,
    engine: str,
    ours: Mapping[str, str],
    known: Callable[[], frozenset[str]],
) -> None:
    """Refuse engine arguments that the engine does not know or that a user may not set.

    Args:
        names: keys of `actor_infer.strategy.engine_args`.
        engine: name of the engine in error messages.
        ours: arguments that follow from the rest of the config -> the config key to set instead, or
            an empty string if there is none.
        known: returns the names that the engine knows; called only if a name is not in `ours`.

    Raises:
        ConfigError: an argument is refused; the message names all of them and what to write
            instead.
        EngineMissingError: raised by `known`, if the engine is not installed.
    """
    problems = []
    unsure = []
    for name in names:
        key = f"actor_infer.strategy.engine_args.{name}"
        if name not in ours:
            unsure.append((key, name))
        elif ours[name]:
            problems.append(f"{key}: set {ours[name]} instead")
        else:
            problems.append(f"{key}: cannot be set: the framework depends on its value")
    if unsure:
        its_own = known()
        problems += [
            f"{key}: {engine} has no such argument{nearest(name, its_own - ours.keys())}"
            for key, name in unsure
            if name not in its_own
        ]
    if problems:
        raise ConfigError("\n".join(problems))


def package_folder(package: str) -> Path:
    """Return the folder of a package, without importing it, which would take seconds.

    Raises:
        EngineMissingError: the package is not installed.
    """
    found = find_spec(package)
    if found is None or found.origin is None:
        raise EngineMissingError(f"{package} is missing, so `engine_args` cannot be checked")
    return Path(found.origin).parent


def parsed_source(*path: str | Path) -> list[ast.stmt]:
    """Return the top-level statements of a source file.

    Args:
        path: folders and name of the file, from `package_folder` on.
    """
    return ast.parse(Path(*path).read_text()).body
