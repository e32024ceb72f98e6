"""Calls of DeepSeek: V3 and R1 with a fence around the arguments, V3.1 without, V3.2 as XML."""

from __future__ import annotations

import re

from roll.envs.tools.formats.api import Call, Malformed, Parsed, arguments_of, loads

_ALL = re.compile(
    r"<\uff5ctool▁calls▁begin\uff5c>(.*?)(?:<\uff5ctool▁calls▁end\uff5c>|\Z)", re.DOTALL
)
_ONE = re.compile(
    r"<\uff5ctool▁call▁begin\uff5c>(.*?)"
    r"(?:<\uff5ctool▁call▁end\uff5c>|(?=<\uff5ctool▁call▁begin\uff5c>)|\Z)",
    re.DOTALL,
)
_SEPARATOR = "<\uff5ctool▁sep\uff5c>"
_FENCED = re.compile(r"\s*([^\n`]+?)\s*\n\s*```json\s*\n(.*?)\n?\s*```\s*", re.DOTALL)
_DSML = re.compile(
    r"<\uff5cDSML\uff5c(?:function|tool)_calls>(.*?)"
    r"(?:</\uff5cDSML\uff5c(?:function|tool)_calls>|\Z)",
    re.DOTALL,
)
_INVOKE = re.compile(
    r"\s*<\uff5cDSML\uff5cinvoke name=\"([^\"]+)\">(.*?)</\uff5cDSML\uff5cinvoke>\s*", re.DOTALL
)
_PARAMETER = re.compile(
    r"\s*<\uff5cDSML\uff5cparameter name=\"([^\"]+)\" string=\"(true|false)\">(.*?)"
    r"</\uff5cDSML\uff5cparameter>\s*",
    re.DOTALL,
)


class DeepSeek:
    """Formats of DeepSeek V3, R1, V3.1 and V3.2."""

    marks = (
        *(f"<\uff5ctool▁{each}\uff5c>" for each in ("calls▁begin", "calls▁end", "call▁begin")),
        *(f"<\uff5ctool▁{each}\uff5c>" for each in ("call▁end", "sep")),
        "\uff5cDSML\uff5c",
    )

    def parse(self, text: str) -> Parsed:
        """Take apart a turn; see `Format.parse`."""
        calls: list[Call | Malformed] = []
        for block in _ALL.findall(text):
            ones = _ONE.findall(block)
            calls += [_call(one) for one in ones]
            if not ones:
                reason = "expected <\uff5ctool▁call▁begin\uff5c> behind the begin of the calls"
                calls.append(Malformed(block.strip(), reason))
        for block in _DSML.findall(text):
            calls += _invoked(block)
        return Parsed(_DSML.sub("", _ALL.sub("", text)).strip(), tuple(calls))


def _call(text: str) -> Call | Malformed:
    """Return the call of V3, R1 or V3.1 between two marks: name, separator, arguments."""
    name, separator, rest = text.partition(_SEPARATOR)
    if not separator:
        return Malformed(text.strip(), f"expected NAME{_SEPARATOR}ARGUMENTS")
    if name.strip() == "function":
        fenced = _FENCED.fullmatch(rest)
        if fenced is None:
            return Malformed(text.strip(), "expected a name, and its arguments in a ```json fence")
        return arguments_of(fenced[1], fenced[2], text.strip())
    return arguments_of(name.strip(), rest, text.strip())


def _invoked(block: str) -> list[Call | Malformed]:
    """Return the calls of a block of V3.2; what does not fit the format becomes `Malformed`."""
    calls: list[Call | Malformed] = []
    for name, inside in _INVOKE.findall(block):
        arguments, wrong = {}, _PARAMETER.sub("", inside).strip()
        for key, is_text, value in _PARAMETER.findall(inside):
            try:
                arguments[key] = value if is_text == "true" else loads(value)
            except ValueError as error:
                wrong = f"{key}: {error}"
        if wrong:
            calls.append(Malformed(inside.strip(), f"wrong parameter of {name!r}: {wrong}", name))
        else:
            calls.append(Call(name, arguments))
    if _INVOKE.sub("", block).strip() or not calls:
        calls.append(Malformed(block.strip(), "expected only complete invocations of tools"))
    return calls
