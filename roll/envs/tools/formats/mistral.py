"""Calls of Mistral: `[TOOL_CALLS]` and a list of calls, or a name and its arguments each time."""

from __future__ import annotations

import re

from roll.envs.tools.formats.api import (
    Call,
    Malformed,
    Parsed,
    arguments_of,
    call_of_value,
    first_value,
)

MARK = "[TOOL_CALLS]"
_NAMED = re.compile(r"([\w.:/-]++)\s*+(?:\[CALL_ID\]\s*+\w*+\s*+)?(?:\[ARGS\])?\s*+(?=\{)")


class Mistral:
    """Format of Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` of older models,
    `[TOOL_CALLS]name[ARGS]{...}` of newer ones, once for each call."""

    marks = (MARK, "[ARGS]", "[CALL_ID]")

    def parse(self, text: str) -> Parsed:
        """Take apart a turn; see `Format.parse`."""
        said, *parts = text.split(MARK)
        calls: list[Call | Malformed] = []
        for part in parts:
            calls += (
                _listed(part)
                if part.lstrip().startswith(("[{", "[ ", "[\n", "{", "[]"))
                else ([_named(part)])
            )
        return Parsed(said.removesuffix("</s>").strip(), tuple(calls))


def _listed(part: str) -> list[Call | Malformed]:
    """Return the calls of a JSON list behind the mark (older models)."""
    text = part.strip().removesuffix("</s>")
    try:
        found, end = first_value(text)
    except ValueError as error:
        return [Malformed(text, f"the calls are not valid JSON: {error}")]
    if text[end:].strip():
        return [Malformed(text, "expected nothing behind the list of calls")]
    listed = found if isinstance(found, list) else [found]
    if not listed:
        return [Malformed(text, "the list of calls is empty")]
    return [call_of_value(each, text) for each in listed]


def _named(part: str) -> Call | Malformed:
    """Return the call behind the mark that is a name and a JSON object (newer models)."""
    text = part.strip().removesuffix("</s>")
    named = _NAMED.match(text)
    if named is None:
        return Malformed(text, f"expected a list of calls, or a name and an object, behind {MARK}")
    try:
        found, end = first_value(text, named.end())
    except ValueError as error:
        reason = f"the arguments of {named[1]!r} are not valid JSON: {error}"
        return Malformed(text, reason, named[1])
    if text[end:].strip():
        return Malformed(text, f"expected nothing behind the arguments of {named[1]!r}", named[1])
    return arguments_of(named[1], found, text)
