"""Texts that are costly to read: Python's `re` and its arithmetic hold the interpreter's lock, so
no time limit of an episode can end them, and a worker stands still."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from roll.envs.tools.built_in.calculator import calculator
from roll.envs.tools.formats.api import Malformed
from roll.envs.tools.formats.loading import FORMATS


@contextmanager
def at_once(cpu_s: float = 2.0) -> Iterator[None]:
    """Fails if what is done takes more CPU time."""
    begun = time.process_time()
    yield
    assert time.process_time() - begun < cpu_s


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("round(5, -10000000)", "0"),
        ("round(5, -1000000000)", "0"),
        ("round(5, 1000000000)", "5"),
        ("round(2.5, -1000000000)", "0"),
        ("round(2.5, 1000000000)", "2.5"),
        ("round(7 * 10**999, -1000)", f"1{'0' * 1000}"),
    ],
)
def test_the_calculator_rounds_to_any_place_at_once(expression: str, value: str) -> None:
    with at_once():
        assert calculator(expression) == value


BAR = "\uff5c"
DEEPSEEK = f"<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>"
INVOKE = f'<{BAR}DSML{BAR}invoke name="add">'
PARAMETER = f'<{BAR}DSML{BAR}parameter name="a" string="true">'
OPENINGS = {
    "hermes": ["<tool_call>", '<tool_call>{"name": "add", "arguments": {"a":'],
    "llama3": [
        '{"name": "add", "parameters": {}}',
        '{"name": 1, "parameters": {}};',
        "<|python_tag|>add.call(",
    ],
    "mistral": ["[TOOL_CALLS]add", "[TOOL_CALLS]add [CALL_ID] ", "[TOOL_CALLS][{", "[TOOL_CALLS] "],
    "harmony": ["<|channel|>", "<|channel|>commentary to=functions.add <|message|>", " to="],
    "deepseek": [
        f"{DEEPSEEK}function<{BAR}tool▁sep{BAR}>",
        f"{DEEPSEEK}function<{BAR}tool▁sep{BAR}>add",
        f"{DEEPSEEK}function<{BAR}tool▁sep{BAR}>add\n```json\n",
        f"<{BAR}DSML{BAR}tool_calls>",
        f"<{BAR}DSML{BAR}tool_calls>{INVOKE}",
        f"<{BAR}DSML{BAR}tool_calls>{INVOKE}{PARAMETER}",
        f"<{BAR}DSML{BAR}tool_calls>{INVOKE}</{BAR}DSML{BAR}invoke>",
    ],
    "qwen_coder": [
        "<tool_call><function=add>",
        "<tool_call><function=",
        "<tool_call><function=add></function>",
        "<tool_call><function=add><parameter=a>",
        "<tool_call><function=add><parameter=",
    ],
    "glm": [
        "<tool_call>",
        "<tool_call>add<arg_key>",
        "<tool_call>add<arg_key>a</arg_key>",
        "<tool_call>add<arg_key>a</arg_key><arg_value>",
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>",
    ],
    "fences": ["```python\n", "```python", "```tool\n{", "```", "\n```tool_call"],
}
"""Beginnings of a call, up to the places where white space, or another mark, may stand."""
CLOSINGS = ["x", "</function></tool_call>", f"</{BAR}DSML{BAR}invoke></{BAR}DSML{BAR}tool_calls>"]
CLOSINGS += ["```", "{", "[ARGS]", f"<{BAR}tool▁call▁end{BAR}><{BAR}tool▁calls▁end{BAR}>"]


def test_every_format_has_its_openings() -> None:
    assert set(OPENINGS) == set(FORMATS) - {"qwen", "gpt_oss"}


@pytest.mark.parametrize("name", sorted(OPENINGS))
def test_runs_of_white_space_in_a_call_are_read_at_once(name: str) -> None:
    for opening in OPENINGS[name]:
        for closing in CLOSINGS:
            with at_once():
                FORMATS[name].parse(opening + " " * 20_000 + "\n" * 20_000 + closing)


@pytest.mark.parametrize("name", sorted(OPENINGS))
@pytest.mark.parametrize("end", ["", "\n", "{"])
def test_repeated_openings_are_read_at_once(name: str, end: str) -> None:
    for opening in OPENINGS[name]:
        last = opening[opening.rfind("<") :] if "<" in opening else opening
        with at_once():
            FORMATS[name].parse((opening + end) * (100_000 // len(opening)))
            FORMATS[name].parse(opening + (last + end) * (100_000 // len(last)))


def test_the_rest_behind_a_call_is_kept_once() -> None:
    calls = FORMATS["llama3"].parse('{"name": 1, "parameters": {}};' * 5_000).calls
    assert len(calls) == 5_000
    assert sum(len(call.text) for call in calls if isinstance(call, Malformed)) < 200_000
