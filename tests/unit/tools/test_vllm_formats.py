"""Calls that a parser of vLLM reads, beside the same calls read by the formats of this package."""

from __future__ import annotations

import asyncio

import pytest

from roll.core.errors import ConfigError
from roll.envs.tools.formats.api import Call, Parsed
from roll.envs.tools.formats.loading import FORMATS, load_format, told_format
from roll.envs.tools.functions import tool_of
from roll.envs.tools.running import run_calls
from tests.unit.episodes.test_tool_episodes import answered
from tests.unit.tools.test_tool_turns import BAR, CALLS, TOOL, add, turns_of

pytestmark = pytest.mark.slow  # vLLM is imported

PARSERS = {
    "qwen3": "vllm:hermes",
    "qwen3_coder": "vllm:qwen3_coder",
    "llama_3_2": "vllm:llama3_json",
    "deepseek_v3_1": "vllm:deepseek_v31",
    "glm_4_6": "vllm:glm45",
}
"""Template -> the parser of vLLM for its family; that of gpt-oss reads no turns, and that of
Mistral takes the id of a call for a part of its name."""
WITH = {"tools": ["tests.unit.episodes.test_tool_episodes:add"]}
SEP, BEGIN, END = (f"<{BAR}tool▁{each}{BAR}>" for each in ("sep", "calls▁begin", "calls▁end"))
ONE, OVER = (f"<{BAR}tool▁call▁{each}{BAR}>" for each in ("begin", "end"))
GOOD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def parsed(name: str, format: str, text: str) -> Parsed:
    turns, _ = turns_of(name)
    return told_format(load_format(format), turns.tokenizer, [TOOL]).parse(text)


def results(found: Parsed) -> list[tuple[str, str]]:
    ran = asyncio.run(run_calls(found.calls, {"add": tool_of(add)}, 5.0))
    return [(result.name, result.text) for result in ran]


def kinds(found: Parsed) -> str:
    return " ".join(type(each).__name__.lower() for each in found.calls) or "answer"


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_the_parser_of_vllm_reads_what_our_format_reads(name: str) -> None:
    ours, written = CALLS[name]
    found = parsed(name, PARSERS[name], written)
    assert results(found) == results(FORMATS[ours].parse(written)) == [("add", "21")]
    answer = parsed(name, PARSERS[name], "The answer is 42.")
    assert (answer.text, answer.calls) == ("The answer is 42.", ())


@pytest.mark.parametrize("name", ["qwen3", "glm_4_6"])
def test_an_episode_with_a_parser_of_vllm_calls_tools(name: str) -> None:
    one, _, _ = answered(name, kwargs={**WITH, "format": PARSERS[name]})
    assert (one.reward, one.parts["q/tool_calls"], one.parts["q/malformed"]) == (1.0, 2, 0)


@pytest.mark.parametrize(
    ("name", "written", "ours", "theirs"),
    [
        ("qwen3", '<tool_call>{"name": "add", "argum</tool_call>', "malformed", "answer"),
        ("qwen3", '<tool_call>{"name": "add"}</tool_call>', "malformed", "answer"),
        ("qwen3", GOOD.replace('{"a": 1}', "[1, 2]"), "malformed", "malformed"),
        ("qwen3", f"{GOOD}<tool_call>add</tool_call>", "call malformed", "answer"),
        ("qwen3", "tool_call: add", "answer", "answer"),
        ("llama_3_2", '{"name": "add", "parameters": {"a": 1', "malformed", "answer"),
        ("llama_3_2", '{"name": "add", "parameters": [1, 2]}', "malformed", "malformed"),
        ("llama_3_2", '{"sum": 21}', "answer", "answer"),
        ("llama_3_2", 'So {"name": "add", "parameters": {"a": 1}}', "answer", "call"),
        ("deepseek_v3_1", f"{BEGIN}{ONE}add{OVER}{END}", "malformed", "malformed"),
        ("deepseek_v3_1", f'{BEGIN}{ONE}add{SEP}{{"a": 1{OVER}{END}', "malformed", "malformed"),
        ("deepseek_v3_1", f"{BEGIN}{END}", "malformed", "malformed"),
    ],
)
def test_what_is_no_call_is_told_apart_as_far_as_vllm_does(
    name: str, written: str, ours: str, theirs: str
) -> None:
    assert kinds(FORMATS[CALLS[name][0]].parse(written)) == ours
    found = parsed(name, PARSERS[name], written)
    assert kinds(found) == theirs
    if theirs == "answer":
        assert found.text == written, "nothing of it is lost"


@pytest.mark.parametrize("format", ["hermes", "vllm:hermes"])
def test_several_calls_keep_their_order_and_the_text_before_them(format: str) -> None:
    calls = [f'<tool_call>{{"name": "add", "arguments": {{"a": {i}}}}}</tool_call>' for i in (1, 2)]
    found = parsed("qwen3", format, "I add.\n" + "\n".join(calls))
    assert found == Parsed("I add.", (Call("add", {"a": 1}), Call("add", {"a": 2})))


def test_a_family_without_a_format_here_calls_tools() -> None:
    found = parsed("llama_3_2", "vllm:pythonic", "[add(a=17, b=4), add(a=1, b=2)]")
    assert results(found) == [("add", "21"), ("add", "3")]


def test_a_parser_keeps_nothing_of_the_turn_before() -> None:
    turns, _ = turns_of("glm_4_6")
    made = told_format(load_format("vllm:glm45"), turns.tokenizer, [TOOL])
    written = CALLS["glm_4_6"][1]
    assert made.parse(written) == made.parse(written)
    assert len(made.parse(written).calls) == 1


def test_a_format_that_vllm_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="vLLM has no parser 'herms'; did you mean 'hermes'"):
        load_format("vllm:herms")


def test_a_parser_that_reads_no_turns_is_refused() -> None:
    with pytest.raises(ConfigError, match="or a format of roll, such as `harmony`"):
        parsed("gpt_oss", "vllm:openai", "left")


def test_a_parser_of_another_family_is_refused_before_the_first_turn() -> None:
    """It needs marks that the tokenizer lacks."""
    with pytest.raises(ConfigError, match=r"could not locate .* in the tokenizer"):
        answered("qwen3", kwargs={**WITH, "format": "vllm:deepseek_v31"})


def test_special_tokens_must_be_shown() -> None:
    with pytest.raises(ConfigError, match="set `special_tokens: show`"):
        answered("qwen3", kwargs={**WITH, "format": "vllm:hermes"}, special_tokens="hide")
