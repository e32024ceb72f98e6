"""Conversations that grow by turns hold the tokens of the policy, and of the template all else."""

from __future__ import annotations

import re
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from roll.config.sections.data import TextDataConfig
from roll.core.types import Message
from roll.data.chat.turns import Turns
from tests.unit.data.test_chat_templates import NAMES, TEMPLATES, byte_tokenizer, settings_of

ENDS = {
    "deepseek_r1_distill_first": "<\uff5cend▁of▁sentence\uff5c>",
    "deepseek_v3_1": "<\uff5cend▁of▁sentence\uff5c>",
    "glm_4_5": "<|user|>",
    "gpt_oss": "<|return|>",
    "llama_3_2": "<|eot_id|>",
    "mistral_small_3_1": "</s>",
    "qwen3": "<|im_end|>",
    "qwen3_thinking_2507": "<|im_end|>",
}
MARK = re.compile(r"<[|\uff5c][^<>]+[|\uff5c]>|</?s>|\[/?(?:INST|SYSTEM_PROMPT)\]|</?think>")
QUESTION, SAID = Message("user", "Which way?"), Message("user", "You see a wall.")


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Bytes, and one token for each mark of the template."""
    tokenizer = byte_tokenizer(name)
    marks = sorted(set(MARK.findall((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))))
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return tokenizer


def turns_of(name: str) -> tuple[Turns, int]:
    tokenizer = tokenizer_of(name)
    end = tokenizer.convert_tokens_to_ids(ENDS[name])
    return Turns(tokenizer, settings_of(), frozenset({end})), end


def text(turns: Turns, tokens: array[int]) -> str:
    return str(turns.tokenizer.decode(list(tokens)))


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_that_the_policy_ended_gets_no_second_end(name: str) -> None:
    turns, end = turns_of(name)
    reply = turns.reply([SAID], last=end)
    cut = turns.reply([SAID], last=None)
    assert SAID.content in text(turns, reply)
    assert len(cut) == len(reply) + 1, "a turn that was cut gets its end, or the next mark"
    assert cut[1:] == reply
    assert text(turns, reply).count(ENDS[name]) == text(turns, cut[1:]).count(ENDS[name])


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("gpt_oss", "glm_4_5")])
def test_a_conversation_is_what_the_template_makes_of_it(name: str) -> None:
    """Where the template neither rewrites answers nor ends them in another way."""
    turns, end = turns_of(name)
    opening, _ = turns.opening([QUESTION])
    answer = array("i", turns.tokenizer(["left"], add_special_tokens=False)["input_ids"][0])
    told = [
        {"role": m.role, "content": m.content}
        for m in (QUESTION, Message("assistant", "left"), SAID)
    ]
    whole = turns.tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
    found = text(turns, opening + answer + array("i", [end]) + turns.reply([SAID], last=end))
    assert bare(found) == bare(str(whole))


def bare(text: str) -> str:
    """Without marks of thoughts, which templates rewrite in earlier answers, and white space."""
    return "".join(re.sub("</?think>", "", text).split())


def test_another_end_than_the_templates_is_kept_and_the_next_message_too() -> None:
    turns, end = turns_of("glm_4_5")
    (other,) = turns.tokenizer(["<|assistant|>"], add_special_tokens=False)["input_ids"][0]
    both = Turns(turns.tokenizer, turns.template, frozenset({end, other}))
    reply = both.reply([SAID], last=other)
    assert text(both, reply).startswith("<|user|>")
    assert both.reply([SAID], last=end) == reply[1:]


def test_a_turn_that_ends_with_a_stop_string_gets_the_templates_end() -> None:
    turns, _ = turns_of("qwen3")
    (last,) = turns.tokenizer([">"], add_special_tokens=False)["input_ids"][0]
    assert text(turns, turns.reply([SAID], last=last)).startswith("<|im_end|>\n<|im_start|>user")


@given(
    st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), min_size=1, max_size=3)
)
def test_whatever_an_environment_says_follows_the_turn(words: list[str]) -> None:
    turns, end = turns_of("qwen3")
    reply = turns.reply([Message("user", word) for word in words], last=end)
    assert text(turns, reply) == "".join(
        f"\n<|im_start|>user\n{word}<|im_end|>" for word in words
    ) + ("\n<|im_start|>assistant\n")


def test_words_that_look_like_the_answer_of_the_probe_do_no_harm() -> None:
    turns, end = turns_of("qwen3")
    said = Message("user", "The right answer was number one, not number two.")
    assert said.content in text(turns, turns.reply([said], last=end))


def test_without_a_template_text_is_text() -> None:
    template = TextDataConfig.model_validate(
        {"sources": ({"path": "x"},), "rows_per_step": 1, "chat_template": False}, strict=False
    )
    turns = Turns(tokenizer_of("qwen3"), template, frozenset())
    tokens, said = turns.opening([QUESTION])
    assert said == text(turns, tokens) == "Which way?"
    assert text(turns, turns.reply([SAID], last=7)) == "You see a wall."
