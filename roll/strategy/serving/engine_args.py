"""Refuses further arguments of an engine that it does not know, or that follow from the config."""

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
    """
    Args:
        names: keys of `actor_infer.strategy.engine_args`.
        engine: what messages call it.
        ours: arguments that follow from the rest of the config, and the key to set instead, if
            there is one.
        known: gives the engine's own list; called only where a name is not in `ours`.

    Raises:
        ConfigError: names each refused one, and what to write instead.
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


def parsed_source(package: str, *path: str) -> list[ast.stmt]:
    """The top-level statements of one of the package's files; importing it would take seconds.

    Raises:
        EngineMissingError: the package is not installed.
    """
    found = find_spec(package)
    if found is None or found.origin is None:
        raise EngineMissingError(f"{package} is missing, so `engine_args` cannot be checked")
    return ast.parse(Path(found.origin).parent.joinpath(*path).read_text()).body
