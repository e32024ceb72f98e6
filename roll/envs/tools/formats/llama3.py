"""Calls of Llama 3: a JSON object with `name` and `parameters` is the whole turn."""

from __future__ import annotations

import ast
import re

from roll.envs.tools.formats.api import Call, Malformed, Parsed, call_of_value, first_value, is_json

PYTHON_TAG = "<|python_tag|>"
_KEYS = ("parameters", "arguments")
_BETWEEN = re.compile(r"\s*+(;?)\s*+")


class Llama3:
    """Format of Llama 3.1 to 3.3 and 4.

    Several calls are separated by `;`. Behind `<|python_tag|>` a call may also read
    `name.call(key="value")`. A turn that does not begin with the tag or with an object that has
    a `name` is an answer.
    """

    marks = (PYTHON_TAG,)

    def parse(self, text: str) -> Parsed:
        """Take apart a turn; see `Format.parse`."""
        before, tagged, after = text.partition(PYTHON_TAG)
        if tagged:
            return Parsed(before.strip(), tuple(_calls(after.strip())))
        begun = text.strip()
        if not begun.startswith("{"):
            return Parsed(begun)
        if '"name"' not in begun or not any(f'"{key}"' in begun for key in _KEYS):
            return Parsed(begun)
        return Parsed("", tuple(_calls(begun)))


def _calls(text: str) -> list[Call | Malformed]:
    """Return the calls of a turn: JSON objects, perhaps with `;` between them, or one
    `name.call(...)`. The text after a mistake is not read."""
    if not text.startswith("{"):
        return [_called(text)]
    calls: list[Call | Malformed] = []
    text, at = text.rstrip(), 0
    while at < len(text):
        try:
            value, end = first_value(text, at)
        except ValueError as error:
            return [*calls, Malformed(text[at:], f"the call is not valid JSON: {error}")]
        calls.append(call_of_value(value, text[at:end], _KEYS))
        between = _BETWEEN.match(text, end)
        at = between.end() if between else end
        joined = between is not None and (between[1] or text.startswith("{", at))
        if at < len(text) and not joined:
            return [*calls, Malformed(text[at:], "expected nothing behind the call")]
    return calls


def _called(text: str) -> Call | Malformed:
    """Return a call that is written `name.call(key="value")`."""
    reason = 'expected {"name": ..., "parameters": {...}} or name.call(key="value")'
    try:
        found = ast.parse(text, mode="eval").body
        if (
            isinstance(found, ast.Call)
            and isinstance(found.func, ast.Attribute)
            and found.func.attr == "call"
            and isinstance(found.func.value, ast.Name)
            and not found.args
            and all(each.arg for each in found.keywords)
        ):
            arguments = {str(each.arg): ast.literal_eval(each.value) for each in found.keywords}
            if is_json(arguments):
                return Call(found.func.value.id, arguments)
            reason = f"{reason}, with values that JSON has too"
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        pass
    return Malformed(text, reason)
