"""Calls of GLM-4.5 and later: a name, then keys and values in marks of their own."""

from __future__ import annotations

import re

from roll.envs.tools.formats.api import Call, Malformed, Parsed, leading

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_ENDS = ("", "/")
_ARGUMENT = re.compile(
    r"\s*+<arg_key>(?>(.*?)</arg_key>)\s*+<arg_value>(?>(.*?)</arg_value>)", re.DOTALL
)


class Glm:
    """Format of GLM-4.5, 4.6 and 4.7.

    Example: `<tool_call>add\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>`
    """

    marks = tuple(
        f"<{end}{name}>" for name in ("tool_call", "arg_key", "arg_value") for end in _ENDS
    )

    def parse(self, text: str) -> Parsed:
        """Take apart a turn; see `Format.parse`."""
        calls = tuple(_call(found[1]) for found in _CALL.finditer(text))
        said = _CALL.sub("", text).replace("</tool_call>", "")
        return Parsed(said.removesuffix("<|observation|>").strip(), calls)


def _call(text: str) -> Call | Malformed:
    """Return the call in a `<tool_call>` mark; its values are text, to be converted by the
    schema."""
    name, mark, rest = text.partition("<arg_key>")
    name = name.strip()
    if not re.fullmatch(r"[\w.:/-]+", name):
        return Malformed(text.strip(), "a call must begin with the name of a tool")
    found, wrong = leading(_ARGUMENT, mark + rest)
    if wrong:
        reason = (
            f"expected only <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> in the call of "
            f"{name!r}"
        )
        return Malformed(text.strip(), reason, name)
    return Call(name, {each[1].strip(): each[2] for each in found}, typed=False)
