"""Thoughts are no answers, whoever opens them and however they are marked."""

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from roll.core.completion import Completion, FinishReason
from roll.core.types import Prompt, Sample
from roll.rewards.decoding import make_decode
from roll.rewards.math.final_answer import FoundAnswer, find_answer
from roll.rewards.math.reward import math_reward
from roll.rewards.thinking import MARKS, final_text
from roll.runtime.validator import answer_key
from tests.tiny import char_tokenizer

NOTHING = FoundAnswer(None, boxed=False)


def _sample(prompt: str, response: str, finish: FinishReason = FinishReason.STOP) -> Sample:
    asked = Prompt("a:0", (1,), prompt, answer="42", tag="math")
    return Sample("0/a:0/0", "0/a:0", asked, Completion.of((1,), (0.0,), (0,), finish), response)


@pytest.mark.parametrize(("opens", "closes"), MARKS)
def test_a_thought_that_the_prompt_opens_is_no_answer_until_it_ends(
    opens: str, closes: str
) -> None:
    prompt = f"<user>6*7?<assistant>{opens}\n"
    for thought in ("maybe 42", r"so \boxed{42} or", "#### 42\n"):
        assert find_answer(thought, prompt=prompt) == NOTHING
        assert math_reward(_sample(prompt, thought)).score == 0
        assert find_answer(f"{thought}{closes}no, 41", prompt=prompt) == FoundAnswer("41", False)
        assert find_answer(f"{opens}{thought}") == NOTHING
        assert find_answer(f"{opens}{thought}{closes} It is 42.") == FoundAnswer("42", False)
    assert math_reward(_sample(prompt, f"hm{closes}It is 42.")).score == 1


def test_a_prompt_whose_thought_is_closed_or_only_spoken_of_opens_none() -> None:
    for prompt in ("<assistant><think>\n\n</think>\n\n", "Explain the <think> tag.<assistant>", ""):
        assert find_answer("It is 42.", prompt=prompt) == FoundAnswer("42", False)


def test_channels_hold_thoughts_and_the_answer() -> None:
    thought = "<|channel|>analysis<|message|>maybe 41"
    final = "<|end|><|start|>assistant<|channel|>final<|message|>It is 42.<|return|>"
    assert final_text(thought + final) == "It is 42."
    assert final_text(thought) is None
    assert find_answer(thought) == NOTHING
    assert find_answer(thought + final) == FoundAnswer("42", False)


def test_the_last_number_of_a_response_that_was_cut_is_no_answer() -> None:
    assert find_answer("first 6, then 42", truncated=True) == NOTHING
    assert find_answer("first 6\n#### 4", truncated=True) == NOTHING
    assert find_answer("first 6\n#### 42\nand", truncated=True) == FoundAnswer("42", False)
    assert find_answer(r"\boxed{42} because", truncated=True) == FoundAnswer("42", True)
    assert math_reward(_sample("6*7?", "then 42", FinishReason.LENGTH)).score == 0
    assert math_reward(_sample("6*7?", "then 42")).score == 1


def test_the_majority_does_not_vote_by_a_number_in_a_thought() -> None:
    sample = _sample("<assistant><think>\n", "perhaps 42")
    assert answer_key(sample, math_tags={"math"}) == "perhaps 42"


def test_marks_that_are_special_tokens_stay_in_the_text() -> None:
    tokenizer = char_tokenizer()
    tokenizer.add_tokens(
        [AddedToken(mark, special=True) for mark in ("[THINK]", "[/THINK]", "<other>")]
    )
    ids = tokenizer("[THINK]ab[/THINK]<other>42<eos>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab42"
    assert make_decode(tokenizer)(ids) == "[THINK]ab[/THINK]42"
    plain = tokenizer("ab<other>42<eos>")["input_ids"]
    assert make_decode(tokenizer)(plain) == "ab42"


GPT_OSS = ("<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|return|>")


def _tokenizer_with(*special: str) -> PreTrainedTokenizerFast:
    tokenizer = char_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in special])
    return tokenizer


@pytest.mark.parametrize("mark", ["<|end|>", "<|start|>", "<|message|>", "<|return|>"])
def test_what_ends_a_turn_is_no_mark_of_a_thought_without_channels(mark: str) -> None:
    tokenizer = _tokenizer_with(mark)
    decode = make_decode(tokenizer)
    assert decode(tokenizer(f"42{mark}")["input_ids"]) == "42"
    assert decode(tokenizer(f"= 42{mark}<eos>")["input_ids"]) == "= 42"
    assert decode(tokenizer(f"4{mark}2")["input_ids"]) == "42"


def test_channels_are_shown_without_what_ends_the_turn() -> None:
    tokenizer = _tokenizer_with(*GPT_OSS)
    thought = "<|channel|>analysis<|message|>41"
    final = "<|end|><|start|>assistant<|channel|>final<|message|>42"
    decode = make_decode(tokenizer)
    for end in ("<|return|>", "<|end|>", "<|end|><eos>"):
        assert decode(tokenizer(thought + final + end)["input_ids"]) == thought + final
    assert final_text(decode(tokenizer(thought + "<|end|>")["input_ids"])) is None


@pytest.mark.parametrize("opens", [opens for opens, _ in MARKS] + ["<|channel|>"])
def test_a_mark_that_is_spoken_of_opens_no_thought(opens: str) -> None:
    for text in (f"In HTML {opens} is no tag. The answer is 42", f"We write `{opens}`: 42"):
        assert find_answer(text) == FoundAnswer("42", False)


@pytest.mark.parametrize(("opens", "closes"), MARKS)
def test_a_second_thought_is_no_answer_until_it_ends(opens: str, closes: str) -> None:
    for text in (
        f"{opens}a{closes}{opens}42",
        f"{opens}a{closes}\n {opens}42",
        f"Well.\n{opens}42",
    ):
        assert find_answer(text) == NOTHING
        assert find_answer(f"{text}{closes}41") == FoundAnswer("41", False)


def test_an_opening_mark_that_is_a_token_opens_a_thought_anywhere() -> None:
    tokenizer = _tokenizer_with("[THINK]", "[/THINK]")
    decode = make_decode(tokenizer)
    assert find_answer(decode(tokenizer("ab [THINK]42")["input_ids"])) == NOTHING
    text = decode(tokenizer("ab [THINK]42[/THINK] 41")["input_ids"])
    assert find_answer(text) == FoundAnswer("41", False)
