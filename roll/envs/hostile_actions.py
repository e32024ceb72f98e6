"""Actions that no environment expects, and that none may fail on."""

from __future__ import annotations

from collections.abc import Mapping

_GAP = " " * 20_000 + "\n" * 20_000 + "x"

HOSTILE: Mapping[str, str] = {
    "nothing": "",
    "white space": " \n\t ",
    "a plain sentence": "I had rather not do anything.",
    "a thought that never ends": "<think> wait, wait, wait",
    "a very long turn": "so it goes on and on " * 5_000,
    "a very long number": "9" * 5_000,
    "a huge power": "9**9**9**9",
    "a division by zero": "answer: 1/0",
    "deep nesting": "calculate: " + "(" * 5_000 + "1" + ")" * 5_000,
    "numbers that are none": "nan inf -inf 1e999 -0",
    "digits of other scripts": "\u0661\u0662 \u00b2 \u2460 \u00bd",
    "odd unicode": "\u202e\u0000\ufffd\U0001f9ee \u200b e\u0301",
    "code": "__import__('os').abort()",
    "quotes and escapes": '\'; import os; """ {} %s {0} \\ search: " OR 1=1',
    "patterns": "search: (((.*)*)*)* [a-",
    "commands without an object": "search:\nclick:\nanswer:\ncalculate:\ngo to\ntake\nput",
    "json": '{"name": null, "arguments": [[[]]]}',
    "many lines": "\n" * 20_000,
    "white space in a call of Qwen": f"<tool_call>\n<function=add>{_GAP}</function></tool_call>",
    "white space in a call of GLM": f"<tool_call>add<arg_key>a</arg_key>{_GAP}",
    "white space in a call of Mistral": f"[TOOL_CALLS]add{_GAP}",
    "white space in a block of code": f"```python{_GAP}\n```",
    "calls that do not end": "<tool_call>add<arg_key>a</arg_key><arg_value>" * 2_000,
}
"""Actions that the check tries, by a short description: some that a policy in training really
writes, and worse ones."""
