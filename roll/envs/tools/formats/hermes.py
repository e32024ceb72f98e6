"""Calls of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import re

from roll.envs.tools.formats.api import Parsed, call_of

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


class Hermes:
    """Format of Hermes, Qwen 2.5 and Qwen 3. The closing mark may be missing at the end of a turn,
    where a stop string may have taken it away."""

    marks = ("<tool_call>", "</tool_call>")

    def parse(self, text: str) -> Parsed:
        """Take apart a turn; see `Format.parse`."""
        calls = tuple(call_of(found[1].strip()) for found in _CALL.finditer(text))
        return Parsed(_CALL.sub("", text).replace("</tool_call>", "").strip(), calls)
