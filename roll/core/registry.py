"""Objects by name: registries for built-in objects, import paths for objects of user code."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

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


def load_object(path: str) -> Any:
    """Import and return the object at `path`, which has the form `package.module:name`.

    Raises:
        ConfigError: the path has another form, or the module or the name does not exist.
    """
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise ConfigError(f"import path {path!r} must read 'package.module:name'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name != missing and not module_name.startswith(missing + "."):
            raise ConfigError(f"{path!r}: importing {module_name} needs {missing!r}") from error
        raise ConfigError(
            f"{path!r}: no module named {missing!r}; is its folder on PYTHONPATH or beside the "
            "YAML file?"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(
            f"{path!r}: {module_name} has no {name!r}{nearest(name, public)}"
        ) from None
