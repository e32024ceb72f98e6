"""Calls of Qwen3-Coder, as XML: `<function=name><parameter=key>value</parameter></function>`."""

from __future__ import annotations

import re

from roll.envs.tools.formats.api import Call, Malformed, Parsed

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>(.*?)</parameter>\s*", re.DOTALL)


class QwenCoder:
    """Format of Qwen3-Coder and later Qwen models."""

    marks = ("<tool_call>", "</tool_call>")

    def parse(self, text: str) -> Parsed:
        """Take apart a turn; see `Format.parse`."""
        calls = tuple(_call(found[1]) for found in _BLOCK.finditer(text))
        return Parsed(_BLOCK.sub("", text).replace("</tool_call>", "").strip(), calls)


def _call(text: str) -> Call | Malformed:
    """Return the call in a `<tool_call>` mark; its values are text, to be converted by the
    schema."""
    function = _FUNCTION.fullmatch(text)
    if function is None:
        return Malformed(text.strip(), "expected <function=NAME>...</function> in <tool_call>")
    name, inside = function.groups()
    if _PARAMETER.sub("", inside).strip():
        reason = f"expected only <parameter=KEY>VALUE</parameter> in the call of {name!r}"
        return Malformed(text.strip(), reason, name)
    arguments = {key: _stripped(value) for key, value in _PARAMETER.findall(inside)}
    return Call(name, arguments, typed=False)


def _stripped(value: str) -> str:
    """Return a value without the one line end that the format puts before and after it."""
    return value.removeprefix("\n").removesuffix("\n")
