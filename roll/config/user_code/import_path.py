"""Objects of users' code, by import path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roll.config.errors import ConfigError, nearest


@contextmanager
def searched_first(folder: Path) -> Iterator[None]:
    """Look for modules in `folder` before all other places, inside the block."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


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
