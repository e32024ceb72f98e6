"""Errors of importing users' modules, told in their own words where these help more."""

from __future__ import annotations

import ast
import re
import sys

from pydantic import PydanticUserError

from roll.config.errors import nearest
from roll.config.user_code.tracebacks import users_place, users_traceback

UNTYPED = "model-field-missing-annotation"
"""Pydantic's code for a field without a type."""


def told_import(error: Exception) -> str:
    """Return what follows `importing my_module failed`: the user's lines, and what to write."""
    if isinstance(error, PydanticUserError) and error.code == UNTYPED:
        return _told_untyped(error)
    return f"\n{users_traceback(error)}{_similar_name(error)}"


def _told_untyped(error: PydanticUserError) -> str:
    """Return the line that says which option has no type."""
    found = re.search(r"`(\w+) = (.*?)`", error.message, re.DOTALL)
    name, value = found.groups() if found else ("option", "1.0")
    try:
        noted = type(ast.literal_eval(value)).__name__
    except (SyntaxError, ValueError):
        noted = "TYPE"
    return (
        f"\n{users_place(error)}: `{name} = {value}` has no type; options are fields with types, "
        f"`{name}: {noted} = {value}` (docs/extend.md)"
    )


def _similar_name(error: Exception) -> str:
    """Return `; did you mean 'x'?` for a name that a module does not have; else an empty text."""
    found = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
    if not (isinstance(error, ImportError) and found and found[2] in sys.modules):
        return ""
    module = sys.modules[found[2]]
    return nearest(found[1], getattr(module, "__all__", dir(module)))
