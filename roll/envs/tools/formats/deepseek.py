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
_DSML = re.compile(
    r"<\uff5cDSML\uff5c(?:function|tool)_calls>(.*?)"
    r"(?:</\uff5cDSML\uff5c(?:function|tool)_calls>|\Z)",
    re.DOTALL,
)
_INVOKE = re.compile(r"<\uff5cDSML\uff5cinvoke name=\"([^\"]++)\">")
_PARAMETER = re.compile(r"<\uff5cDSML\uff5cparameter name=\"([^\"]++)\" string=\"(true|false)\">")


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
        called, _, fence = rest.strip().partition("\n")
        inside = _fenced(fence.strip())
        if inside is None or not called or "`" in called:
            return Malformed(text.strip(), "expected a name, and its arguments in a ```json fence")
        return arguments_of(called.strip(), inside, text.strip())
    return arguments_of(name.strip(), rest, text.strip())


def _fenced(text: str) -> str | None:
    """Return the text in a ```json fence; None if it is no such fence."""
    if not (text.startswith("```json") and text.endswith("```")):
        return None
    inside = text.removeprefix("```json").removesuffix("```")
    begins = len(inside) - len(inside.lstrip())
    return inside if "\n" in inside[:begins] else None


def _marked(
    text: str, opening: re.Pattern[str], closing: str
) -> tuple[list[tuple[re.Match[str], str]], str]:
    """Return the parts of a text between two marks, each with the match of its opening mark; and
    the text around them.

    The text is split at the closing marks first: a pattern of both marks would search the whole
    text for the end of each part that has none.
    """
    *ended, rest = text.split(closing)
    found, around = [], []
    for part in ended:
        opened = opening.search(part)
        if opened is None:
            around.append(part + closing)
        else:
            around.append(part[: opened.start()])
            found.append((opened, part[opened.end() :]))
    return found, "".join([*around, rest]).strip()


def _invoked(block: str) -> list[Call | Malformed]:
    """Return the calls of a block of V3.2; what does not fit the format becomes `Malformed`."""
    calls: list[Call | Malformed] = []
    invocations, around = _marked(block, _INVOKE, "</\uff5cDSML\uff5cinvoke>")
    for invocation, inside in invocations:
        name, arguments = invocation[1], {}
        parameters, wrong = _marked(inside, _PARAMETER, "</\uff5cDSML\uff5cparameter>")
        for parameter, value in parameters:
            try:
                arguments[parameter[1]] = value if parameter[2] == "true" else loads(value)
            except ValueError as error:
                wrong = f"{parameter[1]}: {error}"
        if wrong:
            calls.append(Malformed(inside.strip(), f"wrong parameter of {name!r}: {wrong}", name))
        else:
            calls.append(Call(name, arguments))
    if around or not calls:
        calls.append(Malformed(block.strip(), "expected only complete invocations of tools"))
    return calls
