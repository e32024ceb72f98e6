"""What a name of the absent library is: importable, and an error when it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def absent(module: str, name: str) -> Callable[..., NoReturn]:
    """Stands for `module.name`.

    Raises:
        AttributeError: for names that Python itself looks for.
    """
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(f"{module}.{name} needs torchvision, which has no CPU build here")

    return missing
