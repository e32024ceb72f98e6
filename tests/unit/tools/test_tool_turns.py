"""Tools in a conversation, with chat templates as they were published: their descriptions open it,
and their results follow the policy's own tokens."""

from __future__ import annotations

import json
import re
from array import array
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from roll.core.types import Message, ToolCall
from roll.data.chat.templates import DatedTokenizer
from roll.data.chat.turns import Turns
from roll.envs.tools.formats.api import Call
from roll.envs.tools.formats.loading import FORMATS
from roll.envs.tools.functions import tool_of
from tests.unit.data.test_chat_templates import NAMES, byte_tokenizer, settings_of
from tests.unit.data.test_turns import MARK

FULL = Path(__file__).parent / "tool_templates"
BAR = "\uff5c"
ARGUMENTS = {"a": 17, "b": 4}
JSON = json.dumps(ARGUMENTS)
CALLS = {
    "qwen3": ("hermes", f'<tool_call>\n{{"name": "add", "arguments": {JSON}}}\n</tool_call>'),
    "qwen3_coder": (
        "qwen_coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n17\n</parameter>\n<parameter=b>\n4\n"
        "</parameter>\n</function>\n</tool_call>",
    ),
    "llama_3_2": ("llama3", f'{{"name": "add", "parameters": {JSON}}}'),
    "mistral_small_3_2": ("mistral", f"[TOOL_CALLS]add[CALL_ID]000000001[ARGS]{JSON}"),
    "gpt_oss": (
        "harmony",
        f" to=functions.add<|channel|>commentary json<|message|>{JSON}",
    ),
    "deepseek_v3_1": (
        "deepseek",
        f"<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>add<{BAR}tool▁sep{BAR}>{JSON}"
        f"<{BAR}tool▁call▁end{BAR}><{BAR}tool▁calls▁end{BAR}>",
    ),
    "glm_4_6": (
        "glm",
        "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>17</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>4</arg_value>\n</tool_call>",
    ),
}
"""Template -> format, and the turn that a model of the family writes, without its end."""
ENDS = {
    "qwen3": "<|im_end|>",
    "qwen3_coder": "<|im_end|>",
    "llama_3_2": "<|eot_id|>",
    "mistral_small_3_2": "</s>",
    "gpt_oss": "<|call|>",
    "deepseek_v3_1": f"<{BAR}end▁of▁sentence{BAR}>",
    "glm_4_6": "<|observation|>",
}
MORE_MARKS = re.compile(r"\[/?[A-Z_]{3,}\]|<\|[a-z_]+\|>")
QUESTION = Message("user", "What is 17 + 4?")
RESULT = Message("tool", "twenty-one", name="add", call_id="000000001")


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


TOOL = tool_of(add).description_for_templates


def turns_of(name: str) -> tuple[Turns, int]:
    text = (FULL / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer: PreTrainedTokenizerFast = byte_tokenizer("qwen3")
    tokenizer.chat_template = text
    found = {*MARK.findall(text), *MORE_MARKS.findall(text), ENDS[name]}
    marks = sorted(found | {"<|call|>", "<|return|>", "<|python_tag|>"})  # not in every template
    tokenizer.add_tokens([AddedToken(each, special=True, normalized=False) for each in marks])
    tokenizer.add_tokens([AddedToken(m, special=False, normalized=False) for m in marks])
    end = tokenizer.convert_tokens_to_ids(ENDS[name])
    assert isinstance(end, int)
    dated = DatedTokenizer(tokenizer, datetime(2031, 5, 6))
    return Turns(dated, settings_of(), frozenset({end})), end


def encoded(turns: Turns, text: str) -> array[int]:
    return array("i", turns.tokenizer([text], add_special_tokens=False)["input_ids"][0])


def decoded(turns: Turns, tokens: array[int]) -> str:
    return str(turns.tokenizer.decode(list(tokens), skip_special_tokens=False))


@pytest.mark.parametrize("name", sorted(CALLS))
def test_the_policy_is_told_of_its_tools(name: str) -> None:
    turns, _ = turns_of(name)
    _, told = turns.opening([QUESTION], [TOOL])
    _, plain = turns.opening([QUESTION])
    assert "Adds two numbers." in told
    assert "add" not in plain
    assert turns.shows_tools == (name != "deepseek_v3_1"), "DeepSeek wants them in the system text"


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_conversation_with_a_call_is_what_the_template_makes_of_it(name: str) -> None:
    """The template renders the whole conversation; the turns are put together of the policy's own
    tokens and what lies between them."""
    turns, end = turns_of(name)
    format_name, written = CALLS[name]
    opening, _ = turns.opening([QUESTION], [TOOL])
    turn = encoded(turns, written) + array("i", [end])
    reply = turns.reply([RESULT], last=end)
    found = decoded(turns, opening + turn + reply)
    call = {"name": "add", "arguments": ARGUMENTS}
    shown = {"tools": [TOOL]} if turns.shows_tools else {}
    whole = turns.tokenizer.apply_chat_template(
        [
            *({"role": m.role, "content": m.content} for m in messages_before(turns)),
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "id": "000000001", "function": call}],
            },
            {"role": "tool", "content": RESULT.content, "name": "add", "tool_call_id": "000000001"},
        ],
        tokenize=False,
        add_generation_prompt=True,
        **shown,
    )
    assert bare(found) == bare(str(whole))
    (read,) = FORMATS[format_name].parse(turns.said(turn)).calls
    assert isinstance(read, Call)
    assert read.name == "add"


def messages_before(turns: Turns) -> list[Message]:
    if turns.shows_tools:
        return [QUESTION]
    listed = json.dumps(TOOL, ensure_ascii=False)
    return [Message("system", f"You may call these tools:\n{listed}"), QUESTION]


def bare(text: str) -> str:
    """Without empty thoughts, which templates add to earlier turns, and white space."""
    return "".join(re.sub("</?think>", "", text).split())


@pytest.mark.parametrize("name", sorted(CALLS))
def test_results_hold_no_part_of_the_call_and_a_cut_turn_gets_its_end(name: str) -> None:
    turns, end = turns_of(name)
    reply, cut = turns.reply([RESULT], last=end), turns.reply([RESULT], last=None)
    assert list(cut) == [end, *reply]
    text = decoded(turns, reply)
    assert text.count("twenty-one") == 1
    assert "number one" not in text
    assert "</tool_call>" not in text
    several = [RESULT, Message("tool", "thirty", name="add", call_id="000000002")]
    both = decoded(turns, turns.reply(several, last=end))
    assert 0 < both.index("twenty-one") < both.index("thirty")


@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.parametrize("said", ["", '"quoted"\nand more', "number one", "<>&'"])
def test_whatever_a_tool_says_follows_the_turn(name: str, said: str) -> None:
    turns, end = turns_of(name)
    text = decoded(turns, turns.reply([Message("tool", said, "add", "000000001")], last=end))
    escaped = json.dumps(said, ensure_ascii=False)[1:-1]
    assert said.strip() in text or escaped in text
    assert text.count("number one") == (said == "number one")


@pytest.mark.parametrize("name", NAMES)
def test_a_template_without_tools_gets_them_as_text(name: str) -> None:
    """The reduced templates of plain conversations neither show tools nor know their results."""
    tokenizer = byte_tokenizer(name)
    end = tokenizer.eos_token_id
    turns = Turns(DatedTokenizer(tokenizer, datetime(2031, 5, 6)), settings_of(), frozenset({end}))
    _, told = turns.opening([QUESTION], [TOOL])
    assert "Adds two numbers." in told
    assert QUESTION.content in told
    assert not turns.shows_tools
    assert not turns.knows_results
    text = decoded(turns, turns.reply([RESULT, RESULT], last=None))
    assert text.count("<tool_response>\ntwenty-one\n</tool_response>") == 2


def test_without_a_template_tools_are_text_too() -> None:
    turns, end = turns_of("qwen3")
    plain = Turns(turns.tokenizer, settings_of(chat_template=False), frozenset({end}))
    _, told = plain.opening([QUESTION], [TOOL])
    assert "Adds two numbers." in told
    assert decoded(plain, plain.reply([RESULT], last=None)).count("twenty-one") == 1


@pytest.mark.parametrize("name", sorted(CALLS))
def test_the_end_of_what_a_template_renders_is_the_end_before_a_turn(name: str) -> None:
    """Also behind a result that is part of the opening, where some templates open no thought."""
    turns, end = turns_of(name)
    turns = replace(turns, template=settings_of(chat_template_kwargs={"thinking": True}))
    called = Message("assistant", "", calls=(ToolCall("add", ARGUMENTS, "000000001"),))
    for messages in ([QUESTION], [QUESTION, called, RESULT]):
        tokens, text = turns.opening(messages, [TOOL])
        assert turns.prompt_end(tokens) == text[-64:]
    reply = turns.reply([RESULT], last=end)
    assert decoded(turns, reply).endswith(turns.prompt_end(reply))
    if name == "deepseek_v3_1":
        opens = [turns.prompt_end(turns.opening(m)[0]) for m in ([QUESTION], [called, RESULT])]
        assert [each.endswith("<think>") for each in opens] == [True, False]
