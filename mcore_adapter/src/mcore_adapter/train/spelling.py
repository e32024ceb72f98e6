"""The key that a misspelt or misplaced one was meant to be."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from pydantic import BaseModel


def nearest_key(key: str, model: type[BaseModel]) -> str:
    """`; did you mean x.y?`; when nothing is near, the keys that are known there."""
    known = list(_keys(model))
    by_name = {name.rpartition(".")[2]: name for name in reversed(known)}
    near = get_close_matches(key, known, n=1, cutoff=0.75)
    # In another section: `lr` is found as `optimizer.lr`.
    elsewhere = get_close_matches(key.rpartition(".")[2], by_name, n=1, cutoff=0.75)
    meant = [*near, *(by_name[name] for name in elsewhere)]
    if meant:
        return f"; did you mean {meant[0]}?"
    section = key.rpartition(".")[0]
    there = (name for name in known if name.rpartition(".")[0] == section)
    return f" (known: {', '.join(there)})"


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _keys(inner, f"{prefix}{name}.")
