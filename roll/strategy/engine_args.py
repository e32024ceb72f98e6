"""Refuses further arguments of an engine that it does not know, or that follow from the config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from roll.config.errors import nearest
from roll.core.errors import ConfigError


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
