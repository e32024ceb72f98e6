"""The two kinds of error, and the hint that goes with unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RollError(Exception):
    """Something broke: a worker, an engine, a disk (exit code 1)."""


class UserError(RollError, ValueError):
    """Something the user wrote is wrong (exit code 2)."""


class ConfigError(UserError):
    """A YAML file, an override or a value in it."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing when nothing is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
