"""Calls of Qwen3-Coder, as XML: `<function=name><parameter=key>value</parameter></function>`."""

from __future__ import annotations

import re

from roll.envs.tools.formats.api import Call, Malformed, Parsed, leading

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]++)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"\s*+<parameter=([^>\s]++)>(?>(.*?)</parameter>)", re.DOTALL)


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
    function = _FUNCTION.fullmatch(text.strip())
    if function is None:
        return Malformed(text.strip(), "expected <function=NAME>...</function> in <tool_call>")
    name, inside = function.groups()
    parameters, rest = leading(_PARAMETER, inside)
    if rest:
        reason = f"expected only <parameter=KEY>VALUE</parameter> in the call of {name!r}"
        return Malformed(text.strip(), reason, name)
    arguments = {found[1]: _stripped(found[2]) for found in parameters}
    return Call(name, arguments, typed=False)


def _stripped(value: str) -> str:
    """Return a value without the one line end that the format puts before and after it."""
    return value.removeprefix("\n").removesuffix("\n")
