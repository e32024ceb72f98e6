"""`absent`: a stand-in for a name of the absent library, which fails only when it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def absent(module: str, name: str) -> Callable[..., NoReturn]:
    """Return a stand-in for `module.name`, which raises a RuntimeError when it is called.

    Raises:
        AttributeError: `name` begins with two underscores; Python itself looks for such names.
    """
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(f"{module}.{name} needs torchvision, which has no CPU build here")

    return missing
