"""Answers that an agent gets for turns of the policy, whatever it wrote: texts and calls."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import APIStatusError, OpenAI

from roll.config.sections.environment import EnvironmentConfig
from roll.core.errors import EnvironmentFailedError
from roll.core.types import Message
from roll.data.chat.turns import Turns
from roll.envs.agents.answers import answer_of
from roll.envs.agents.api import AgentTask
from roll.envs.agents.host import AgentHost
from roll.envs.agents.requests import ChatRequest
from roll.envs.tools.formats.api import Call, Malformed, Parsed
from roll.envs.tools.formats.glm import Glm
from roll.envs.tools.formats.llama3 import Llama3
from roll.envs.tools.formats.loading import FORMATS
from tests.tiny import char_tokenizer
from tests.unit.data.test_chat_templates import settings_of
from tests.unit.data.test_turns import turns_of
from tests.unit.episodes.test_agent_host import ask, client, played, user
from tests.unit.episodes.test_contexts import encoded
from tests.unit.tools.test_tool_turns import turns_of as tool_turns_of

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


async def with_tools(task: AgentTask) -> float:
    """Agent whose reward is 1 if a turn is a text, without calls."""
    tools: list[Any] = [{"type": "function", "function": ADD}]
    messages: list[Any] = [user("go")]
    found = await client(task).chat.completions.create(model="m", messages=messages, tools=tools)
    return float(found.choices[0].message.tool_calls is None)


@pytest.mark.parametrize("value", NO_JSON, ids=lambda value: value[:20])
def test_an_argument_of_llama_that_is_no_json_makes_the_call_malformed(value: str) -> None:
    (call,) = Llama3().parse(f"<|python_tag|>add.call(a={value})").calls
    assert isinstance(call, Malformed)
    *_, last = played(with_tools, f"<|python_tag|>add.call(a={value})", tool_format="llama3")
    assert (last.reward, last.info["malformed"]) == (1.0, 1.0)


def test_a_turn_at_which_a_format_breaks_fails_the_episode_and_not_the_run() -> None:
    FORMATS.register("breaks_at_all")(BreaksAtAll())
    try:
        with pytest.raises(EnvironmentFailedError, match=r"cannot read what .* wrote .*KeyErr"):
            played(with_tools, "go", tool_format="breaks_at_all")
    finally:
        del FORMATS._things["breaks_at_all"]  # other tests take each format that there is


def test_a_plain_agent_does_not_wait_for_an_answer_that_cannot_be_read() -> None:
    told = threading.Event()

    def agent(task: AgentTask) -> float:
        made = OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0, timeout=20)
        asked: dict[str, Any] = {"tools": [{"type": "function", "function": ADD}]}
        asked |= {"model": "m", "messages": [user("go")]}
        try:
            made.chat.completions.create(**asked)
        except APIStatusError:
            told.set()
        return 0.0

    async def main() -> bool:
        config = EnvironmentConfig(agent="a:b", tool_format="breaks_at_all")
        turns = Turns(char_tokenizer(), settings_of(), frozenset({1}))
        host = AgentHost("helper", config, agent, turns)
        try:
            await host.open("e", 7, {})
            with pytest.raises(EnvironmentFailedError):
                await host.act("e", "go", 1)
            await host.close("e")
            return await asyncio.to_thread(told.wait, 10)
        finally:
            await host.shut()

    FORMATS.register("breaks_at_all")(BreaksAtAll())
    try:
        assert asyncio.run(main())
    finally:
        del FORMATS._things["breaks_at_all"]


def test_an_argument_of_llama_that_is_json_is_kept() -> None:
    (call,) = Llama3().parse("<|python_tag|>add.call(a={'b': [1, -2.5, None, True, 'c']})").calls
    assert call == Call("add", {"a": {"b": [1, -2.5, None, True, "c"]}})


TYPED = {
    "qwen_coder": "<tool_call>\n<function=put>\n<parameter=row>\n3\n</parameter>\n"
    '<parameter=cells>\n[1, "a"]\n</parameter>\n<parameter=name>\n3\n</parameter>\n'
    "</function>\n</tool_call>",
    "glm": "<tool_call>put\n<arg_key>row</arg_key>\n<arg_value>3</arg_value>\n<arg_key>cells"
    '</arg_key>\n<arg_value>[1, "a"]</arg_value>\n<arg_key>name</arg_key>\n'
    "<arg_value>3</arg_value>\n</tool_call>",
}
SCHEMA = {
    "type": "object",
    "properties": {
        "row": {"type": "integer"},
        "cells": {"type": "array"},
        "name": {"type": "string"},
    },
}


@pytest.mark.parametrize("format", TYPED)
def test_arguments_that_a_format_writes_as_text_get_the_types_of_the_tool(format: str) -> None:
    got: list[Any] = []

    async def agent(task: AgentTask) -> float:
        put = {"name": "put", "parameters": SCHEMA}
        asked: dict[str, Any] = {"tools": [{"type": "function", "function": put}]}
        asked |= {"model": "m", "messages": [user("go")]}
        found: Any = await client(task).chat.completions.create(**asked)
        got.append(json.loads(found.choices[0].message.tool_calls[0].function.arguments))
        return 1.0

    assert played(agent, TYPED[format], tool_format=format)[-1].reward == 1.0
    assert got == [{"row": 3, "cells": [1, "a"], "name": "3"}]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "enum", "anyOf", "properties", "a"]), inner)
    ),
    max_leaves=6,
)


@given(JSON)
def test_arguments_are_read_whatever_the_schema_of_a_client_is(schema: Any) -> None:
    for each in (schema, {"properties": schema}, {"properties": {"a": schema}}):
        tools: Any = ({"type": "function", "function": {"name": "put", "parameters": each}},)
        request = ChatRequest((Message("user", "go"),), (), None, stream=False, tools=tools)
        said = "<tool_call>put<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>"
        (call,) = answer_of(said, request, Glm(), cut=False).calls
        assert call.arguments == {"a": "x"}


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "add", "arguments": {"a": "\\ud800"}}',
        '{"name": "add", "arguments": {"\\udc00": 1}}',
        '{"name": "add\\ud800", "arguments": {}}',
    ],
)
def test_a_call_with_half_of_a_surrogate_pair_is_malformed(call: str) -> None:
    async def agent(task: AgentTask) -> float:
        """Sends back what it got, and asks again."""
        tools: list[Any] = [{"type": "function", "function": ADD}]
        made = client(task).chat.completions
        messages: list[Any] = [user("go")]
        first: Any = await made.create(model="m", messages=messages, tools=tools)
        more: Any = [*messages, first.choices[0].message.model_dump(exclude_none=True)]
        calls = first.choices[0].message.tool_calls or []
        more += [{"role": "tool", "tool_call_id": each.id, "content": "?"} for each in calls]
        more.append(user("on"))
        await made.create(model="m", messages=more, tools=tools)
        return float(not calls)

    *_, last = played(agent, f"<tool_call>{call}</tool_call>", "so")
    assert (last.reward, last.info["malformed"]) == (1.0, 1.0)


def heard_by_agent(said: str, *, tools: bool, cut: bool = False, **config: Any) -> str:
    """What an agent gets of a turn of gpt-oss whose special tokens are shown."""
    turns, end = turns_of("gpt_oss")
    got: list[str] = []

    async def agent(task: AgentTask) -> float:
        offered: Any = {"tools": [{"type": "function", "function": ADD}]} if tools else {}
        got.append(await ask(task, [user("go")], **offered))
        return 1.0

    async def main() -> None:
        settings = EnvironmentConfig.model_validate(
            {"agent": "a:b", "special_tokens": "show", "tool_format": "gpt_oss", **config}
        )
        host = AgentHost("helper", settings, agent, turns)
        try:
            await host.open("e", 7, {})
            written = array("i", [*encoded(turns, said), *([] if cut else [end])])
            await host.act("e", written, None if cut else end)
        finally:
            await host.shut()

    asyncio.run(asyncio.wait_for(main(), 30))
    return got[0]


THOUGHT = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"


@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize("thought", ["", THOUGHT])
def test_an_agent_gets_the_final_text_of_gpt_oss_without_marks(tools: bool, thought: str) -> None:
    said = f"{thought}<|channel|>final<|message|>It is 21."
    assert heard_by_agent(said, tools=tools) == "It is 21."
    assert heard_by_agent(f"{said} An", tools=tools, cut=True) == "It is 21. An"


def test_an_agent_gets_nothing_of_a_cut_thought_or_call_of_gpt_oss() -> None:
    call = "<|channel|>commentary to=functions.add<|message|>{"
    for said in ("<|channel|>analysis<|message|>why", f"{THOUGHT}{call}"):
        assert heard_by_agent(said, tools=True, cut=True) == ""


def test_an_agent_that_is_to_see_thoughts_gets_all_of_gpt_oss() -> None:
    said = f"{THOUGHT}<|channel|>final<|message|>It is 21."
    assert heard_by_agent(said, tools=False, thoughts="show") == said


def test_an_answer_to_a_conversation_that_begins_with_a_result_begins_in_no_thought() -> None:
    """DeepSeek V3.1 opens a thought behind the user, and none behind a result."""
    turns, end = tool_turns_of("deepseek_v3_1")
    turns = replace(turns, template=settings_of(chat_template_kwargs={"thinking": True}))
    got: list[str] = []

    async def agent(task: AgentTask) -> float:
        call = {"type": "function", "id": "c", "function": {"name": "add", "arguments": "{}"}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "content": "21", "tool_call_id": "c"}
        got.append(await ask(task, [user("go"), said, result]))
        return 1.0

    async def main() -> None:
        settings = EnvironmentConfig(agent="a:b", special_tokens="show")
        host = AgentHost("helper", settings, agent, turns)
        try:
            await host.open("e", 7, {})
            await host.act("e", array("i", [*encoded(turns, "It is 21."), end]), end)
        finally:
            await host.shut()

    asyncio.run(asyncio.wait_for(main(), 30))
    assert got == ["It is 21."]
