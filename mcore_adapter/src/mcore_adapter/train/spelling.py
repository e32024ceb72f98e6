"""Suggestions for misspelt or misplaced keys."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import get_args

from pydantic import BaseModel


def nearest_key(key: str, model: type[BaseModel]) -> str:
    """Return a suggestion for an unknown key, to be appended to an error message.

    The suggestion is `; did you mean x.y?` with the most similar key. If no key is similar, the
    suggestion lists the known keys of the same section.

    Args:
        key: unknown key, with its sections: `section.name`.
        model: model that has the known keys.
    """
    known = list(_keys(model))
    section, name = _split(key)
    there = {_split(other)[1]: other for other in known if _split(other)[0] == section}
    # Keys of all sections, so that `optimizer.lr` is found for `lr`.
    everywhere = {_split(other)[1]: other for other in known}
    for keys, cutoff in ((everywhere, 1.0), (there, 0.6), (everywhere, 0.75)):
        near = get_close_matches(name, keys, n=1, cutoff=cutoff)
        if near:
            return f"; did you mean {keys[near[0]]}?"
    return f" (known: {', '.join(there.values())})"


def _split(key: str) -> tuple[str, str]:
    """Split a key into its section, which is empty at the top, and its name."""
    section, _, name = key.rpartition(".")
    return section, name


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the names of all sections and keys, such as `section` and `section.key`."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from _keys(inner, f"{prefix}{name}.")
