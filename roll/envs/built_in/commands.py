"""Commands in an action: lines of the form `name: argument`."""

from __future__ import annotations

import re
from collections.abc import Collection


def last_command(action: str, names: Collection[str]) -> tuple[str, str] | None:
    """Return the last command in an action as (name, argument); None if there is none.

    A command is a line `name: argument` or `name[argument]`. Case does not matter in the name, and
    marks of Markdown around it are ignored.

    Args:
        action: what the policy wrote.
        names: names of the commands, in lower case.
    """
    for line in reversed(action[-100_000:].split("\n")):
        found = re.match(r"[\s>*#`-]*([A-Za-z_]+)[\s*`]*[:\[][\s*`]*(.*)$", line)
        if found and found[1].lower() in names:
            argument = found[2].strip().strip("*`").rstrip()
            bracket = "[" in line[: found.start(2)] and argument.endswith("]")
            return found[1].lower(), (argument[:-1] if bracket else argument).strip()
    return None
