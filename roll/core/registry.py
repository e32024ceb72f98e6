"""Registries: built-in objects by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from roll.config.errors import ConfigError, nearest

T = TypeVar("T")


class Registry(Generic[T]):
    """Built-in objects of one kind, by name. Registering a name twice raises ValueError. Looking up
    an unknown name raises ConfigError, which lists the known names."""

    def __init__(self, kind: str) -> None:
        """Begin without objects; `kind` is a noun for an object in messages, such as `reward`."""
        self.kind = kind
        self._things: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that adds an object under `name` and returns it. ValueError if the
        name is taken."""

        def add(thing: T) -> T:
            if name in self._things:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._things[name] = thing
            return thing

        return add

    def __getitem__(self, name: str) -> T:
        """Return the object with this name; ConfigError, which lists the known names, if there is
        none."""
        if name not in self._things:
            raise ConfigError(
                f"unknown {self.kind} {name!r}{nearest(name, self._things)} "
                f"(known: {', '.join(sorted(self._things))})"
            )
        return self._things[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._things))

    def __contains__(self, name: object) -> bool:
        return name in self._things
