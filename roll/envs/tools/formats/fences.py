"""Calls as plain code fences, for models that know no format of their own."""

from __future__ import annotations

import re

from roll.envs.tools.formats.api import Call, Malformed, Parsed, call_of

_FENCE = re.compile(r"^[ \t]*```([\w+-]+)[ \t]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.M)
LANGUAGES = {
    "python": ("python", "code"),
    "py": ("python", "code"),
    "bash": ("shell", "command"),
    "sh": ("shell", "command"),
    "shell": ("shell", "command"),
}
"""Language of a fence -> tool, and name of its argument."""
_CLOSED = re.compile(r"```[ \t]*\Z")


class Fences:
    """A fence in Python or shell is a call of the tool `python` or `shell`; a fence in `tool` or
    `tool_call` holds `{"name": ..., "arguments": {...}}`. Other fences are text."""

    marks = ("```",)

    def parse(self, text: str) -> Parsed:
        """Take apart a turn; see `Format.parse`."""
        calls: list[Call | Malformed] = []

        def take(found: re.Match[str]) -> str:
            """Note the call of a fence and return an empty text; return a fence that is no call
            unchanged."""
            language, inside = found[1].lower(), _CLOSED.sub("", found[2])
            if language not in (*LANGUAGES, "tool", "tool_call"):
                return found[0]
            if not _CLOSED.search(found[0]):
                calls.append(Malformed(found[0], "the fence is not closed with ```"))
            elif language in LANGUAGES:
                tool, argument = LANGUAGES[language]
                calls.append(Call(tool, {argument: inside}))
            else:
                calls.append(call_of(inside))
            return ""

        said = _FENCE.sub(take, text)
        return Parsed(said.strip(), tuple(calls))
