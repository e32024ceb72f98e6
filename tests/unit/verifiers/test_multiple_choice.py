"""The option that a response chooses: found where it is stated, and nowhere else."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.core.errors import DataError
from roll.rewards.answers.letters import find_choice
from roll.rewards.answers.multiple_choice import multiple_choice_reward
from roll.rewards.contract import sample_of

FOUR = dict.fromkeys("ABCD", "")
CITIES = {"A": "London", "B": "Rome", "C": "Paris", "D": "All of the above"}

CHOSEN = [
    (r"\boxed{C}", "C"),
    (r"\boxed{(c)}", "C"),
    (r"\boxed{\text{C}}", "C"),
    (r"\boxed{\textbf{(C)}}", "C"),
    (r"\boxed{C. 42 m}", "C"),
    (r"\boxed{C: because}", "C"),
    (r"\boxed{A} no, \boxed{C}", "C"),
    (r"Answer: A. In a box: \boxed{C}", "C"),
    (r"\[\boxed{C}\]", "C"),
    ("The answer is C", "C"),
    ("The answer is C.", "C"),
    ("the correct answer is (C) because of this.", "C"),
    ("Answer: (C)", "C"),
    ("**Answer:** C", "C"),
    ("**Answer: C**", "C"),
    ("Final answer: **C**.", "C"),
    ("Answer: option C", "C"),
    ("The answer is option (c).", "C"),
    ("answer: c", "C"),
    ("The answer to this question is C since it fits.", "C"),
    ("The correct option is C", "C"),
    ("The right choice would be C!", "C"),
    ("I choose C.", "C"),
    ("I'll go with option C", "C"),
    ("Option C is correct.", "C"),
    ("A is wrong. Option (C) is the correct answer.", "C"),
    ("Hence\n#### C", "C"),
    ("<answer>C</answer>", "C"),
    ("<answer> (C) Paris </answer>", "C"),
    ("C", "C"),
    ("(C)", "C"),
    ("c)", "C"),
    ("**C**", "C"),
    ("C. Paris", "C"),
    ("I think about it.\n\nC", "C"),
    ("The answer is B. Wait. The answer is C.", "C"),
    ("The answer is A.", "A"),
    ("Answer: A", "A"),
    ("A", "A"),
    ("A)", "A"),
    ("The answer is A because a cat is an animal", "A"),
    ("The answer is C, A is wrong.", "C"),
    ("Thus C is the best answer.", "C"),
    ("C is my final answer.", "C"),
    ("Choice: C", "C"),
    ("Answer - C", "C"),
    ("I'd pick C.", "C"),
    ("\u7b54\u6848\u662fC\u3002", "C"),
    ("\u6545\u9009\uff1aC", "C"),
    ("The answer is $C$", "C"),
    ("The answer is \u201cC\u201d", "C"),
]
NOT_CHOSEN = [
    "",
    " \n",
    "A good question needs a good answer",
    "The answer is a matter of taste",
    "The answer is A matter of taste",
    "A",  # replaced below by prose
    "I do not know",
    "The answer is not C",
    "The answer isn't C",
    "Consider options (A), (B), (C) and (D) in turn.",
    "Option A says so, option B does not.",
    "C-rations were eaten",
    "C's are there",
    "The answer is \u0421",  # a Cyrillic letter
    "The answer is E",
    r"\boxed{E}",
    r"\boxed{}",
    "Plan B it is",
    "One option: a long walk",
    "My answer - a long one - is no",
    "Neither A nor B is correct",
    "Either A or B is correct",
]
NOT_CHOSEN.remove("A")
SEVERAL = [
    r"\boxed{A, B, C, D}",
    r"\boxed{ABCD}",
    r"\boxed{A or C}",
    r"\boxed{A/C}",
    "The answer is A, B, C, D",
    "The answer is A or C",
    "The answer is C or A.",
    "Answer: (A)(C)",
    "Answer: (C) (A)",
    "Answer: C and A",
    "Answer: A B C D",
    "A\nB\nC\nD",
    "(A)\n(C)",
    "A) London\nB) Rome\nC) Paris",
    "<answer>A, C</answer>",
    "Answer: A|B|C|D",
    "Answer: A.B.C.D",
    "Answer: A-D",
    "The answer is (A) or maybe (B)",
]


@pytest.mark.parametrize(("response", "letter"), CHOSEN)
def test_a_stated_option_is_found(response: str, letter: str) -> None:
    assert find_choice(response, FOUR).letters == {letter}


@pytest.mark.parametrize("response", NOT_CHOSEN)
def test_letters_elsewhere_are_no_answer(response: str) -> None:
    assert find_choice(response, FOUR).letters == set()


@pytest.mark.parametrize("response", SEVERAL)
def test_who_names_several_options_has_not_chosen_one(response: str) -> None:
    assert len(find_choice(response, FOUR).letters) > 1


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        (r"\boxed{Paris}", "C"),
        (r"\boxed{\text{paris}.}", "C"),
        ("The answer is Paris.", "C"),
        ("Answer: paris", "C"),
        ("Paris", "C"),
        ("The answer is all of the above.", "D"),
    ],
)
def test_the_text_of_an_option_counts_as_its_letter(response: str, letter: str) -> None:
    assert find_choice(response, CITIES).letters == {letter}


def _score(
    response: str, answer: str, extra: dict[str, Any] | None = None, **options: Any
) -> float:
    return multiple_choice_reward(sample_of(response, answer=answer, extra=extra), **options).score


def test_the_truth_may_be_a_letter_a_text_or_an_index() -> None:
    row = {"choices": list(CITIES.values())}
    for truth, answer in (
        ("letter", "(C)"),
        ("letter", "C. Paris"),
        ("text", "Paris"),
        ("index", "2"),
    ):
        assert _score("The answer is C.", answer, row, truth=truth) == 1.0
        assert _score("The answer is B.", answer, row, truth=truth) == 0.0
    assert _score("C", "C") == 1.0
    assert _score("C", "C", {"choices": {"label": ["1", "2", "3"], "text": ["x", "y", "z"]}}) == 1.0


def test_several_right_options_must_all_be_named_and_no_other() -> None:
    for response, score in ((r"\boxed{A, C}", 1.0), (r"\boxed{C}", 0.0), (r"\boxed{A, B, C}", 0.0)):
        assert _score(response, "A, C") == score


def test_thoughts_are_not_looked_at() -> None:
    assert _score("<think>The answer is C.</think> I cannot say", "C") == 0.0
    assert _score(r"<think>never ends \boxed{C}", "C") == 0.0
    assert _score("<think>The answer is B.</think>C", "C") == 1.0


def test_without_a_right_answer_nothing_is_right() -> None:
    assert _score("", "") == _score("C", "") == 0.0


@pytest.mark.parametrize(
    ("answer", "truth"), [("Z9", "letter"), ("Berlin", "text"), ("9", "index")]
)
def test_a_row_without_a_right_option_is_told(answer: str, truth: str) -> None:
    with pytest.raises(DataError, match="is not the"):
        _score("C", answer, {"choices": list(CITIES.values())}, truth=truth)


@pytest.mark.parametrize(
    "unit",
    [
        "(",
        "A ",
        "A, ",
        "answer is ",
        "the answer is A or ",
        "\n",
        r"\boxed{",
        "answer ",
        "*",
        "option ",
    ],
)
def test_long_hostile_responses_take_linear_time(unit: str) -> None:
    before = time.process_time()
    find_choice(unit * (200_000 // len(unit)), CITIES)
    assert time.process_time() - before < 3


@pytest.mark.parametrize("begin", ["the answer", "the answer is", "right option", "I pick", "答案"])
@pytest.mark.parametrize("run", [" ", "*", "\t", " *", "* "])
def test_a_long_run_behind_the_word_answer_takes_linear_time(begin: str, run: str) -> None:
    before = time.process_time()
    find_choice(f"{begin}{run * 50_000}x", CITIES)
    assert time.process_time() - before < 1


@given(st.text(max_size=100), st.sampled_from([FOUR, CITIES]))
@settings(deadline=None)
def test_no_response_fails(response: str, options: dict[str, str]) -> None:
    for text in (response, f"The answer is {response}", f"\\boxed{{{response}}}"):
        assert find_choice(text, options).letters <= options.keys()
