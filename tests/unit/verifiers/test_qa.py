"""Short answers: where they are found, and that their scores are SQuAD's."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.data.metrics.squad_metrics import compute_exact, compute_f1

from roll.core.errors import DataError
from roll.rewards.answers.crossthink import crossthink_reward
from roll.rewards.answers.qa import qa_reward
from roll.rewards.answers.spans import find_span
from roll.rewards.answers.squad import contains, exact_match, f1
from roll.rewards.contract import sample_of

WORDS = st.sampled_from(
    [
        "the",
        "a",
        "An",
        "cat",
        "Cat.",
        "dog",
        "dog's",
        "U.S.",
        "1,000",
        "-",
        "\u00e9t\u00e9",
        "New York",
    ]
)
TEXTS = st.lists(WORDS, max_size=8).map(" ".join)


@given(TEXTS, TEXTS)
def test_the_numbers_are_those_of_squads_script(answer: str, gold: str) -> None:
    if gold.strip() and compute_exact(gold, ""):
        return  # nothing of the gold is left; the next test says what happens
    assert exact_match(answer, gold) == compute_exact(gold, answer)
    assert f1(answer, gold) == pytest.approx(compute_f1(gold, answer))


def test_a_gold_of_which_nothing_is_left_is_compared_itself() -> None:
    assert exact_match("", "The The") == f1("", "The The") == 0.0
    assert exact_match("the the", "The The") == f1("the the", "The The") == 1.0
    assert exact_match("", "") == f1("", "") == 1.0


def test_contains_wants_whole_words_and_a_short_answer() -> None:
    assert contains("It was in Paris, France.", "paris", 30) == 1.0
    assert contains("the Parisians", "Paris", 30) == 0.0
    assert contains("Rome or Paris or Berlin", "Paris", 4) == 0.0


@pytest.mark.parametrize(
    ("response", "place", "text"),
    [
        ("<answer> Paris </answer>", "auto", "Paris"),
        ("<answer>Rome</answer> no <answer>Paris</answer>.", "auto", "Paris"),
        ("<answer><answer>Paris</answer>", "auto", "Paris"),
        ("<answer>Paris", "tag", None),
        (r"so \boxed{\text{Paris}}", "auto", "Paris"),
        (r"\boxed{Rome} <answer>Paris</answer>", "box", "Rome"),
        ("Answer: Paris\nBye", "auto", "Paris"),
        ("**Answer:** Paris", "auto", "Paris"),
        ("The answer is Paris", "auto", "Paris"),
        ("x\n#### Paris", "auto", "Paris"),
        ("Paris", "auto", "Paris"),
        ("Paris", "line", None),
    ],
)
def test_the_answer_is_found_at_its_place(response: str, place: Any, text: str | None) -> None:
    span = find_span(response, place)
    assert (span.text if span else None) == text


def _qa(response: str, answer: str, extra: dict[str, Any] | None = None, **options: Any) -> float:
    return qa_reward(sample_of(response, answer=answer, extra=extra), **options).score


def test_the_best_of_several_right_answers_counts() -> None:
    golds = ["Paris", "City of Light"]
    assert _qa("The answer is the city of light.", json.dumps(golds)) == 1.0
    assert _qa("city", "", {"golds": golds}, golds="golds", metric="f1") == pytest.approx(0.5)
    assert _qa("Paris", "", {"answers": {"text": golds}}, golds="answers") == 1.0
    with pytest.raises(DataError, match="has no column 'gold'"):
        _qa("Paris", "", {}, golds="gold")
    with pytest.raises(DataError, match="is empty"):
        _qa("Paris", "", {"golds": []}, golds="golds")


def test_neither_thoughts_nor_an_empty_answer_score() -> None:
    assert _qa("<think>Paris</think>", "Paris", metric="contains") == 0.0
    assert _qa("<think>Answer: Paris", "Paris", metric="f1") == 0.0
    assert _qa("", "The", metric="f1") == 0.0


CHOICE, FREE = "(C) Paris", "the Eiffel Tower"


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"<think>hm</think> \boxed{C}", CHOICE, 1.0),
        (r"<think>hm</think> \boxed{(C) Paris}", CHOICE, 1.0),
        (r"<think>hm</think> \boxed{Paris}", CHOICE, 1.0),
        (r"<think>hm</think> \boxed{C}", "C", 1.0),
        (r"<think>hm</think> \boxed{A, C}", CHOICE, 0.0),
        (r"<think>hm</think> \boxed{Eiffel tower}", FREE, 1.0),
        (r"<think>hm</think> \boxed{\text{Eiffel tower.}}", FREE, 1.0),
        (r"<think>hm</think> \boxed{a tower}", FREE, 0.0),
        ("<think>hm</think> Eiffel tower", FREE, 0.0),
        (r"\boxed{C}", CHOICE, 0.0),
        (r"<think></think> \boxed{C}", CHOICE, 0.0),
        (r"<think>hm</think> \boxed{A} \boxed{C}", CHOICE, 0.0),
        (r"<think>hm \boxed{C}", CHOICE, 0.0),
        (r"<think>hm</think> \boxed{}", CHOICE, 0.0),
    ],
)
def test_crossthink_wants_the_right_answer_in_its_format(
    response: str, answer: str, score: float
) -> None:
    assert crossthink_reward(sample_of(response, answer=answer)).score == score


def test_crossthink_may_ignore_the_format() -> None:
    for response, answer in (("The answer is C.", CHOICE), ("Eiffel tower", FREE)):
        assert crossthink_reward(sample_of(response, answer=answer), format="ignored").score == 1.0
    no_thought = sample_of(r"\boxed{C}", answer=CHOICE)
    assert crossthink_reward(no_thought, thoughts=False).score == 1.0


@pytest.mark.parametrize("unit", ["<answer>", "answer: ", r"\boxed{", "the ", "####", "a"])
def test_long_hostile_responses_take_linear_time(unit: str) -> None:
    sample = sample_of(unit * (300_000 // len(unit)), answer="(C) Paris")
    before = time.process_time()
    qa_reward(sample)
    crossthink_reward(sample)
    assert time.process_time() - before < 4


@given(st.text(max_size=100), st.sampled_from([CHOICE, FREE]))
def test_no_response_fails(response: str, answer: str) -> None:
    for text in (response, f"<think>x</think>{response}", f"\\boxed{{{response}}}"):
        sample = sample_of(text, answer=answer)
        assert 0 <= qa_reward(sample, metric="f1").score <= 1
        assert crossthink_reward(sample).score in (0, 1)
