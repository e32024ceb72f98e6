"""Agents that offer tools of their own, at both forms of the endpoint; the policy is scripted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai import BadRequestError
from pydantic import ValidationError
from smolagents import OpenAIModel, Tool, ToolCallingAgent

from roll.config.sections.environment import EnvironmentConfig
from roll.core.errors import ConfigError, EnvironmentFailedError
from roll.core.types import Message, ToolCall
from roll.data.chat.turns import Turns
from roll.envs.agents.answers import Answer, answer_of
from roll.envs.agents.api import AgentTask
from roll.envs.agents.conversations import Conversations
from roll.envs.agents.host import AgentHost
from roll.envs.agents.requests import ChatRequest, RequestError
from roll.envs.agents.responses import request_of
from roll.envs.tools.formats.hermes import Hermes
from tests.tiny import char_tokenizer
from tests.unit.data.test_chat_templates import settings_of
from tests.unit.episodes.test_agent_host import client, played, text

QUIET = RunConfig(tracing_disabled=True)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 17, "b": 4}}</tool_call>'
FUNCTION: dict[str, Any] = {"name": "add", "parameters": {"type": "object", "properties": {}}}


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def openai_agent(kind: type[Any]) -> Any:
    async def run(task: AgentTask) -> float:
        model = kind(model=task.model, openai_client=client(task))
        agent = Agent(name="adder", instructions="Be brief.", model=model, tools=[add])
        found = await Runner.run(agent, "17+4?", run_config=QUIET)
        return float(found.final_output == "21")

    return run


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
@pytest.mark.parametrize("said", [CALL, f"I add. {CALL}"])
def test_openai_agents_run_the_calls_and_continue_the_conversation(
    kind: type[Any], said: str
) -> None:
    first, second, last = played(openai_agent(kind), said, "21")
    assert "add" in text(first)
    assert (second.row, text(second)) == (0, "21<assistant>")
    counts = {"tool_calls": 1.0, "malformed": 0.0, "malformed_rate": 0.0}
    assert (last.reward, dict(last.info)) == (1.0, counts)


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_several_calls_of_a_turn_are_run_together(kind: type[Any]) -> None:
    other = CALL.replace("17", "1")
    _, second, last = played(openai_agent(kind), f"{CALL}\n{other}", "21")
    assert second.row == 0
    assert text(second) == "215<assistant>"
    assert (last.reward, last.info["tool_calls"]) == (1.0, 2.0)


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_streams_have_calls_too(kind: type[Any]) -> None:
    async def run(task: AgentTask) -> float:
        model = kind(model=task.model, openai_client=client(task))
        agent = Agent(name="adder", model=model, tools=[add])
        stream = Runner.run_streamed(agent, "17+4?", run_config=QUIET)
        async for _ in stream.stream_events():
            pass
        return float(stream.final_output == "21")

    _, second, last = played(run, f"I add. {CALL}", "21")
    assert (second.row, last.reward) == (0, 1.0)


class Adding(Tool):
    name = "add"
    description = "Adds two numbers."
    inputs = {
        "a": {"type": "integer", "description": "one"},
        "b": {"type": "integer", "description": "other"},
    }
    output_type = "integer"

    def forward(self, a: int, b: int) -> int:
        return a + b


def test_smolagents_call_tools() -> None:
    def run(task: AgentTask) -> float:
        model = OpenAIModel(
            model_id=task.model,
            api_base=task.base_url,
            api_key=task.api_key,
            tool_choice="auto",
        )
        agent = ToolCallingAgent(tools=[Adding()], model=model, max_steps=3, verbosity_level=0)
        return float(agent.run("17+4?") == 21)

    final = '<tool_call>{"name": "final_answer", "arguments": {"answer": 21}}</tool_call>'
    _, second, last = played(run, CALL, final)
    assert "21" in text(second)
    assert last.reward == 1.0


def test_a_call_that_cannot_be_read_is_text_and_counted() -> None:
    async def run(task: AgentTask) -> float:
        tools: list[Any] = [{"type": "function", "function": FUNCTION}]
        messages: list[Any] = [{"role": "user", "content": "go"}]
        made = await client(task).chat.completions.create(model="m", messages=messages, tools=tools)
        return float(made.choices[0].message.content == "<tool_call>oh</tool_call>")

    *_, last = played(run, "<tool_call>oh</tool_call>")
    counts = {"tool_calls": 1.0, "malformed": 1.0, "malformed_rate": 1.0}
    assert (last.reward, dict(last.info)) == (1.0, counts)


def test_no_call_is_taken_from_a_turn_that_was_cut_or_without_tools() -> None:
    with_tools = chat(Message("user", "go"), tools=({"type": "function", "function": FUNCTION},))
    assert answer_of(CALL, with_tools, Hermes(), cut=True) == Answer(CALL, finish="length")
    assert answer_of(CALL, chat(Message("user", "go"), tools=()), None, cut=False) == Answer(CALL)
    (call,) = answer_of(CALL, with_tools, Hermes(), cut=False).calls
    assert (call.name, call.arguments) == ("add", {"a": 17, "b": 4})


def chat(*messages: Message, tools: tuple[Any, ...] = (FUNCTION,)) -> ChatRequest:
    return ChatRequest(messages, (), None, stream=False, tools=tools)


def test_other_tools_or_arguments_begin_another_conversation() -> None:
    go, result = Message("user", "go"), Message("tool", "21", call_id="1")
    call = ToolCall("add", {"a": 17, "b": 4}, "1")
    book = Conversations()
    assert book.place(chat(go))[2]
    book.answered(0, Answer("I add.", (call,)), f"I add.{CALL}")
    renamed = ToolCall("add", {"b": 4, "a": 17}, "other id")
    for said in ("I add.", ""):
        again = Message("assistant", said, calls=(renamed,))
        assert Conversations.place(copy_of(book), chat(go, again, result)) == (0, (result,), False)
    for other in (ToolCall("add", {"a": 1, "b": 4}), ToolCall("sub", call.arguments)):
        again = Message("assistant", "I add.", calls=(other,))
        assert book.place(chat(go, again, result))[2]
    again = Message("assistant", "I add.", calls=(call,))
    assert book.place(chat(go, again, result, tools=()))[2]


def copy_of(book: Conversations) -> Conversations:
    made = Conversations()
    made._known = [type(one)(one.tools, list(one.said)) for one in book._known]
    return made


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tool_choice": "required"}, '`tool_choice` = "required" is not supported'),
        ({"tools": [{"type": "web_search"}]}, "`tools` may hold functions only"),
        ({"functions": [FUNCTION]}, "`functions` = .*; leave it out"),
        ({"response_format": {"type": "json_object"}}, "`response_format` = .*in a message"),
        ({"response_format": {"type": "json_schema"}}, "`response_format` = "),
        ({"text": {"format": {"type": "json_schema"}}}, r"`text\.format` = .*in a message"),
        ({"text": 3}, r"`text\.format` = 3"),
        ({"top_logprobs": 3}, "`top_logprobs` = 3 is not supported; leave it out"),
        ({"max_tool_calls": 3}, "`max_tool_calls` = 3 is not supported; leave it out"),
        ({"parallel_tool_calls": "no"}, "`parallel_tool_calls` must be true or false"),
    ],
)
def test_what_the_policy_cannot_do_is_refused(more: dict[str, Any], message: str) -> None:
    if not more.keys() & {"text", "max_tool_calls"}:
        with pytest.raises(RequestError, match=message):
            ChatRequest.of({"messages": [{"role": "user", "content": "go"}], **more})
    if not more.keys() & {"functions", "response_format"}:
        with pytest.raises(RequestError, match=message):
            request_of({"input": "go", **more})


def test_what_only_one_of_the_forms_can_ask_for_is_refused() -> None:
    chats = {"audio": {"voice": "a"}, "modalities": ["audio"], "web_search_options": {}}
    for key, value in chats.items():
        with pytest.raises(RequestError, match=f"`{key}` = .* is not supported; leave it out"):
            ChatRequest.of({"messages": [{"role": "user", "content": "go"}], key: value})
    asked = {"prompt": {"id": "p"}, "include": ["message.output_text.logprobs"]}
    for key, value in asked.items():
        with pytest.raises(RequestError, match=f"`{key}` = .* is not supported; leave it out"):
            request_of({"input": "go", key: value})


def test_messages_that_would_hold_up_all_others_are_refused() -> None:
    long = {"role": "user", "content": "x" * 3 * 10**6}
    with pytest.raises(RequestError, match=r"`messages` may have 4,194,304 .* found 6,000,000"):
        ChatRequest.of({"messages": [long, long]})
    with pytest.raises(RequestError, match="`input` may have 4,194,304 characters"):
        request_of({"input": [long, long]})


def test_settings_with_the_values_that_they_have_anyway_are_served() -> None:
    alike: dict[str, Any] = {"top_logprobs": 0, "parallel_tool_calls": True}
    chats: dict[str, Any] = {"response_format": {"type": "text"}, "n": 1, "logprobs": False}
    chats |= {"modalities": ["text"]}
    asked: dict[str, Any] = {"text": {"format": {"type": "text"}, "verbosity": "low"}}
    asked |= {"max_tool_calls": None, "include": ["reasoning.encrypted_content"]}
    for more in ({}, alike | chats, dict.fromkeys([*alike, *chats])):
        assert ChatRequest.of({"messages": [{"role": "user", "content": "go"}], **more}).parallel
    for more in ({}, alike | asked, dict.fromkeys([*alike, *asked])):
        assert request_of({"input": "go", **more}).parallel


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_an_agent_that_wants_one_call_at_a_time_gets_no_several(kind: type[Any]) -> None:
    async def run(task: AgentTask) -> float:
        model = kind(model=task.model, openai_client=client(task))
        one = ModelSettings(parallel_tool_calls=False)
        agent = Agent(name="adder", model=model, tools=[add], model_settings=one)
        found = await Runner.run(agent, "17+4?", run_config=QUIET)
        return float(found.final_output == f"{CALL}\n{CALL}")

    _, second, last = played(run, CALL, f"{CALL}\n{CALL}")
    assert text(second) == "21<assistant>"
    counts = {"tool_calls": 2.0, "malformed": 1.0, "malformed_rate": 0.5}
    assert (last.reward, dict(last.info)) == (1.0, counts)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": 3}, "must be a JSON object with `input`"),
        ({"input": []}, "`input` is empty"),
        ({"input": "go", "previous_response_id": "resp_1"}, "`previous_response_id` = "),
        ({"input": [{"type": "web_search_call"}]}, "an item of type 'web_search_call'"),
        ({"input": ["go"]}, "an item of `input` must be an object"),
        ({"input": [{"type": "function_call", "name": 3}]}, "a call must have a name"),
    ],
)
def test_a_body_that_is_no_response_request_is_refused(body: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        request_of(body)


def test_items_of_an_answer_are_one_message() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": json.dumps({"a": 1})},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    request = request_of({"input": items, "instructions": "Be brief.", "max_output_tokens": 9})
    system, user, said, result = request.messages
    assert (system.role, user.content, said.content) == ("system", "go", "I")
    assert said.calls == (ToolCall("add", {"a": 1}, "c"),)
    assert (result.name, result.content, request.max_new_tokens) == ("add", "1", 9)


def test_a_refused_request_tells_the_agent_why() -> None:
    async def run(task: AgentTask) -> float:
        made = client(task).responses
        with pytest.raises(BadRequestError, match="`previous_response_id` = "):
            await made.create(model="m", input="go", previous_response_id="resp_1")
        answer = await made.create(model="m", input="go", max_output_tokens=1)
        return float(answer.output_text == "cu" and answer.status == "incomplete")

    assert played(run, "cu~")[-1].reward == 1.0


def test_what_the_chat_template_refuses_fails_the_episode_and_not_the_run() -> None:
    async def run(task: AgentTask) -> float:
        body: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "go"}]
        await client(task).chat.completions.create(model="m", messages=body)
        return 1.0

    async def main() -> None:
        tokenizer = char_tokenizer()
        tokenizer.chat_template = (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
            + str(tokenizer.chat_template)
        )
        turns = Turns(tokenizer, settings_of(), frozenset({1}))
        host = AgentHost("helper", EnvironmentConfig(agent="a:b"), run, turns)
        try:
            await host.open("e", 7, {})
        finally:
            await host.shut()

    with pytest.raises(EnvironmentFailedError, match=r"not render what the agent sends.*no sys"):
        asyncio.run(asyncio.wait_for(main(), 30))


def test_a_format_that_there_is_not_or_that_nobody_uses_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown format of calls 'hermse'"):
        played(openai_agent(OpenAIResponsesModel), tool_format="hermse")
    with pytest.raises(ValidationError, match="`tool_format` is for `agent`"):
        EnvironmentConfig(env="frozen_lake", tool_format="mistral")
