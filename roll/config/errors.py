"""The two kinds of error, and a hint for unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RollError(Exception):
    """Failure while a run works: a worker, an engine, a disk (exit code 1)."""


class UserError(RollError, ValueError):
    """Mistake in something that the user wrote (exit code 2)."""


class ConfigError(UserError):
    """Mistake in a YAML file, an override, or a value in one of them."""


def nearest(name: str, known: Iterable[str], *, most: int = 1) -> str:
    """Return `; did you mean 'x'?` with the known names most similar to `name`, at most `most`; an
    empty text if no known name is similar."""
    close = difflib.get_close_matches(name, list(known), n=most, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
