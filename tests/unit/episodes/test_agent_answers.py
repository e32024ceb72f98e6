"""Answers that an agent gets for turns of the policy, whatever it wrote: texts and calls."""

from __future__ import annotations

import pytest

from roll.core.errors import EnvironmentFailedError
from roll.envs.agents.api import AgentTask
from roll.envs.tools.formats.api import Call, Malformed, Parsed
from roll.envs.tools.formats.llama3 import Llama3
from roll.envs.tools.formats.loading import FORMATS
from tests.unit.episodes.test_agent_host import client, played, user

ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
# Values that Python has and JSON has not, or that cannot be written.
NO_JSON = [
    "...",
    "{1, 2}",
    "b'x'",
    "2j",
    '{1: 2, "a": 3}',
    "{1: 2}",
    "[(1, ...)]",
    "(1, 2)",
    "1e999",
]
NO_JSON += [f"0x{4000 * 'f'}"]


class BreaksAtAll:
    """Format that breaks its word never to raise."""

    marks = ()

    def parse(self, text: str) -> Parsed:
        raise KeyError(text)


FORMATS.register("breaks_at_all")(BreaksAtAll())


async def with_tools(task: AgentTask) -> float:
    """Agent whose reward is 1 if a turn is a text, without calls."""
    tools = [{"type": "function", "function": ADD}]
    made = client(task).chat.completions
    found = await made.create(model="m", messages=[user("go")], tools=tools)  # type: ignore[call-overload]
    return float(found.choices[0].message.tool_calls is None)


@pytest.mark.parametrize("value", NO_JSON, ids=lambda value: value[:20])
def test_an_argument_of_llama_that_is_no_json_makes_the_call_malformed(value: str) -> None:
    (call,) = Llama3().parse(f"<|python_tag|>add.call(a={value})").calls
    assert isinstance(call, Malformed)
    *_, last = played(with_tools, f"<|python_tag|>add.call(a={value})", tool_format="llama3")
    assert (last.reward, last.info["malformed"]) == (1.0, 1.0)


def test_a_turn_at_which_a_format_breaks_fails_the_episode_and_not_the_run() -> None:
    with pytest.raises(EnvironmentFailedError, match=r"cannot read what the policy wrote .*KeyErr"):
        played(with_tools, "go", tool_format="breaks_at_all")


def test_an_argument_of_llama_that_is_json_is_kept() -> None:
    (call,) = Llama3().parse("<|python_tag|>add.call(a={'b': [1, -2.5, None, True, 'c']})").calls
    assert call == Call("add", {"a": {"b": [1, -2.5, None, True, "c"]}})
