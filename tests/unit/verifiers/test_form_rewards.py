"""Format, repetition and length of responses."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.core.completion import FinishReason
from roll.core.errors import ConfigError
from roll.core.types import Sample
from roll.rewards.api import RewardContext
from roll.rewards.contract import sample_of
from roll.rewards.form.format import format_reward
from roll.rewards.form.hygiene import hygiene_reward
from roll.rewards.form.length import length_reward
from roll.rewards.form.repetition import compression_ratio, repeated_share, repetition_reward
from roll.rewards.form.tags import in_order_and_once
from roll.rewards.loading import load_reward

TAGS = ("think", "answer")
PROSE = (
    "The harbour was quiet before dawn. Two fishermen mended their nets while a third boiled water "
    "for tea, and nobody spoke of the storm that had sunk four boats last week. Gulls waited."
)


def _sample(response: str) -> Sample:
    return sample_of(response, answer="")


@pytest.mark.parametrize(
    ("response", "fits"),
    [
        ("<think>a</think><answer>b</answer>", True),
        (" <think>\na\n</think>\n<answer> b </answer>\n", True),
        ("<think>a</think>b<answer>c</answer>", False),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False),
        ("<think>a<think>b</think></think><answer>c</answer>", False),
        ("<think>a<answer>b</answer></think>", False),
        ("<think>a</think><answer></answer>", False),
        ("<think> . </think><answer>b</answer>", False),
        ("<think>a</think><answer>b", False),
        ("<think>a</think><answer>b</answer> bye", False),
        ("<think>a</think><Answer>x</Answer><answer>b</answer>", False),
        ("<think>a</think><answer>b< / think ></answer>", False),
        ("", False),
    ],
)
def test_tags_stand_in_order_and_once(response: str, fits: bool) -> None:
    assert in_order_and_once(response, TAGS) is fits
    assert format_reward(_sample(response), tags=TAGS).score == float(fits)


def test_a_tag_may_be_opened_by_the_prompt_and_text_allowed_between() -> None:
    rest = "a</think><answer>b</answer>"
    assert in_order_and_once(rest, TAGS, prompt="user: ...<think>\n")
    assert not in_order_and_once(rest, TAGS)
    between = "so <think>a</think> hence <answer>b</answer>."
    assert in_order_and_once(between, TAGS, text_between=True)


def test_the_language_is_that_of_the_answer() -> None:
    german = "Der Hafen war still, und zwei Fischer flickten ihre Netze vor dem Haus."
    assert format_reward(_sample(PROSE), language="en").score == 1.0
    assert format_reward(_sample(german), language="en").score == 0.0
    assert format_reward(_sample(f"<think>{PROSE}</think>{german}"), language="de").score == 1.0
    assert format_reward(_sample("12345 67"), language="en").score == 0.0
    chinese = "\u4eca\u5929\u5929\u6c14\u5f88\u597d\u6211\u4eec\u53bb\u516c\u56ed\u73a9"
    assert format_reward(_sample(chinese), language="zh").score == 1.0
    assert format_reward(_sample(chinese + PROSE), language="zh").score == 0.0
    assert (
        format_reward(_sample("\u3053\u3093\u306b\u3061\u306f\u4e16\u754c"), language="ja").score
        == 1.0
    )


def test_conditions_are_joined() -> None:
    found = format_reward(_sample(PROSE), words=(5, 10), language="en", score="share")
    assert found.score == 0.5
    assert found.parts == {"language": 1.0, "words": 0.0}
    assert format_reward(_sample(PROSE), words=(5, 10), language="en").score == 0.0
    assert format_reward(_sample("..."), words=(0, 10)).score == 0.0


def test_the_share_of_repeated_ngrams_is_counted() -> None:
    assert repeated_share("a b c a b c", 2) == pytest.approx(2 / 5)
    assert repeated_share("a b c d", 2) == 0.0
    assert repeated_share("A a A a", 1) == pytest.approx(3 / 4)
    assert repeated_share("\u4eca\u4eca\u4eca", 1) == pytest.approx(2 / 3)
    assert repeated_share("a", 4) == repeated_share("", 4) == 0.0


@pytest.mark.parametrize("kind", ["ngram", "compression"])
def test_loops_are_punished_and_prose_is_not(kind: Any) -> None:
    assert repetition_reward(_sample(PROSE), kind=kind).score == 0.0
    loop = PROSE + " wait, let me think again." * 200
    assert repetition_reward(_sample(loop), kind=kind).score < -0.6
    assert -1 <= repetition_reward(_sample("so " * 5000), kind=kind).score < -0.9
    hidden = _sample(f"<think>{loop}</think>{PROSE}")
    assert repetition_reward(hidden, kind=kind).score < -0.6
    assert repetition_reward(hidden, kind=kind, text="final").score == 0.0


def test_no_penalty_is_zero_without_a_sign() -> None:
    for found in (
        repetition_reward(_sample("x")),
        repetition_reward(_sample("x"), kind="compression"),
        length_reward(_sample("x"), longest=9),
        hygiene_reward(_sample("x"), rules=("tool_syntax",)),
    ):
        assert str(found.score) == "0.0"


def test_short_texts_are_not_judged_by_compression() -> None:
    assert compression_ratio("a" * 199) == 1.0
    assert compression_ratio("a" * 400) < 0.1


def test_the_length_penalty_falls_over_its_slope() -> None:
    def score(words: int, **options: Any) -> float:
        return length_reward(_sample("x " * words), **options).score

    band: dict[str, Any] = {"shortest": 10, "longest": 20, "slope": 10}
    assert [score(n, **band) for n in (10, 20, 25, 30, 99)] == [0, 0, -0.5, -1, -1]
    assert [score(n, **band) for n in (5, 0)] == [-0.5, -1]
    assert score(25, unit="words", **band) == -0.5
    thoughts = _sample("<think>" + "x " * 99 + "</think>one two")
    assert length_reward(thoughts, longest=2, unit="final_words").score == 0.0


def test_a_cut_response_may_get_the_full_penalty() -> None:
    sample = _sample("x")
    cut = replace(sample, completion=replace(sample.completion, finish=FinishReason.LENGTH))
    assert length_reward(cut, longest=9).score == 0.0
    assert length_reward(cut, truncated=True).score == -1.0
    assert length_reward(sample, truncated=True).score == 0.0


@pytest.mark.parametrize(
    ("fn", "kwargs", "says"),
    [
        ("format", {}, "give at least one of tags, language and words"),
        ("format", {"tags": ["<think>"]}, "a name without brackets"),
        ("format", {"tags": ["a", "a"]}, "expected each once"),
        ("format", {"words": [5, 2]}, r"expected \[smallest, largest\]"),
        ("format", {"words": [5]}, "words"),
        ("format", {"language": "english"}, "language 'english' is unknown"),
        ("repetition", {"n": 0}, "expected 1 to 100"),
        ("repetition", {"free": 1.0}, "expected a share"),
        ("repetition", {"floor": 0}, "expected a ratio"),
        ("repetition", {"n": "4"}, "found '4'"),
        ("length", {}, "give at least one of shortest, longest"),
        ("length", {"longest": 2, "shortest": 3}, "expected 0 <= shortest <= longest"),
        ("length", {"longest": 2, "slope": 0}, "expected at least 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(fn: str, kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_reward(fn, kwargs, RewardContext("mine", 0))


UNITS = ["<think>", "<", "< ", "a ", "a", "\u4eca", "</", "\n"]


def _all(response: str) -> None:
    sample = _sample(response)
    assert format_reward(sample, tags=TAGS, language="en", words=(1, 9), score="share").score in (
        0,
        pytest.approx(1 / 3),
        pytest.approx(2 / 3),
        1,
    )
    for text in ("all", "final"):
        assert -1 <= repetition_reward(sample, text=text).score <= 0
        assert -1 <= repetition_reward(sample, kind="compression").score <= 0
    assert -1 <= length_reward(sample, longest=3, unit="final_words").score <= 0


@pytest.mark.parametrize("unit", UNITS)
def test_long_hostile_responses_take_linear_time(unit: str) -> None:
    before = time.process_time()
    _all(unit * (200_000 // len(unit)))
    assert time.process_time() - before < 5


@given(st.text(max_size=100))
@settings(deadline=None, max_examples=50)
def test_no_response_fails(response: str) -> None:
    _all(response)
    _all(f"<think>{response}</think><answer>{response}</answer>")
    _all(response + "\ud800")
