"""Calls of gpt-oss: messages in channels (harmony) that are addressed to a tool."""

from __future__ import annotations

import re

from roll.envs.tools.formats.api import Call, Malformed, Parsed, arguments_of

_BORDER = re.compile(r"<\|(?:start|end|call|return)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class Harmony:
    """Format of gpt-oss. `to=functions.NAME` addresses a tool with a JSON object; `to=python` the
    tool `python`, with its code as it is. Thoughts are in the channel `analysis`."""

    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")

    def parse(self, text: str) -> Parsed:
        """Take apart a turn; see `Format.parse`."""
        if "<|channel|>" not in text and "<|message|>" not in text:
            return Parsed(text.strip())
        calls: list[Call | Malformed] = []
        said: list[str] = []
        for message in _BORDER.split(text):
            head, begun, body = message.partition("<|message|>")
            channel, to = _CHANNEL.search(head), _RECIPIENT.search(head)
            if not begun:
                if channel is not None or to is not None:
                    reason = "a message must have <|channel|>NAME<|message|>TEXT"
                    calls.append(Malformed(message.strip(), reason))
            elif to is not None:
                calls.append(_call(to[1], body))
            elif channel is None or channel[1] != "analysis":
                said.append(body.strip())
        return Parsed("\n".join(filter(None, said)), tuple(calls))


def _call(recipient: str, body: str) -> Call | Malformed:
    """Return the call of a message to a tool; a message to `python` is code and not JSON."""
    name = recipient.removeprefix("functions.")
    if recipient == "python":
        return Call("python", {"code": body})
    return arguments_of(name, body.strip(), body.strip())
