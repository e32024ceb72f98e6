"""The math reward: which answer is taken, and what it is equal to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.rewards.contract import sample_of
from roll.rewards.math.final_answer import FoundAnswer, find_answer, find_truth, last_box
from roll.rewards.math.plain_equivalence import plainly_equal
from roll.rewards.math.reward import math_reward


@pytest.mark.parametrize(
    ("response", "text", "boxed"),
    [
        (r"so \boxed{42}", "42", True),
        (r"\boxed{1} no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}", True),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", True),
        (r"\fbox{7}", "7", True),
        (r"\boxed {7}", "7", True),
        (r"\boxed 7 is it", "7", True),
        (r"\boxed{1} and then \boxed{2", "1", True),
        (r"{ \boxed{3}", "3", True),
        (r"\boxed{\text{if } x \boxed{5}}", r"\text{if } x \boxed{5}", True),
        (r"<think>\boxed{1}</think> it is \boxed{2}", "2", True),
        (r"<think>\boxed{1}</think> it is 3", "3", False),
        (r"opened in the prompt, \boxed{1}</think>\boxed{2}", "2", True),
        (r"<think> maybe 17, or \boxed{17}", None, False),
        ("reasoning 3 + 4\n#### 7", "7", False),
        ("#### 5\n#### 6 apples", "6 apples", False),
        ("The total is $1,234.50.", "$1,234.50", False),
        ("it drops to -3", "-3", False),
        ("10-3", "3", False),
        ("he pays 3/4 of it", "3/4", False),
        ("about 5, then 12, I think.", "12", False),
        ("1e-3", "1e-3", False),
        ("no idea", None, False),
        ("", None, False),
    ],
)
def test_the_last_answer_is_found(response: str, text: str | None, boxed: bool) -> None:
    assert find_answer(response) == FoundAnswer(text, boxed)


def test_the_truth_may_be_a_whole_solution() -> None:
    assert find_truth("16 - 3 = <<16-3=13>>13\n#### 1,013") == "1,013"
    assert find_truth(r"Clearly $x = 2$, so \boxed{2}.") == "2"
    assert find_truth(r" \frac{1}{2} ") == r"\frac{1}{2}"


@given(st.recursive(st.text("ab \\$0", max_size=4), lambda t: t.map(lambda s: "{" + s + "}")))
def test_any_balanced_content_is_taken_whole(content: str) -> None:
    content = content.replace("\\", "")
    assert last_box("a } } \\boxed{" + content + "} b") == content.strip()


EQUAL = [
    ("18", "18"),
    ("18", "18.0"),
    ("18", "$18"),
    ("18", r"\$18.00"),
    ("18", "18."),
    ("18", "+18"),
    ("1234", "1,234"),
    ("1234567", "1{,}234{,}567"),
    ("10000", r"10\,000"),
    ("-5", "\u22125"),
    ("-5", r"$-5$"),
    ("0.5", ".5"),
    ("0.5", "1/2"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac12", r"\dfrac{1}{2}"),
    (r"-\frac{7}{5}", r"\frac{-7}{5}"),
    (r"\frac{2}{4}", r"\tfrac{1}{2}"),
    (r"\frac{1}{3}", "0.333333"),
    ("50%", "0.5"),
    ("50", r"50\%"),
    ("1.5e3", "1500"),
    (r"3 \times 10^{8}", "3e8"),
    (r"2.5 \cdot 10^{-3}", "0.0025"),
    ("5", r"5\text{ cm}"),
    ("5", "5 cm"),
    ("12", r"12\text{ square meters}"),
    ("72", "72 dollars"),
    ("90", r"90^\circ"),
    ("45", r"45^{\circ}"),
    ("Yes", "yes"),
    ("True", r"\text{True}"),
    ("A", "(A)"),
    ("B", r"\text{B}"),
    ("x + 1", "x+1"),
    (r"\left(1, 2\right)", "(1,2)"),
    (r"\{1, 2\}", r"\{ 1,2 \}"),
    (r"\dfrac{\pi}{4}", r"\frac{\pi}{4}"),
]
DIFFERENT = [
    ("18", "19"),
    ("18", "-18"),
    ("18", "1.8"),
    ("1234", "1,235"),
    ("0.5", "0.50001"),
    (r"\frac{1}{3}", "0.33"),
    (r"\frac{1}{3}", "0.333334"),
    ("123456789", "123456790"),
    ("50%", "0.05"),
    ("5 km", "5 m"),
    ("1e-9", "2e-9"),
    ("1e300", "1e299"),
    ("5", "5 million"),
]
UNDECIDED = [
    ("2x", "x + x"),
    ("2", "2ab"),
    ("Yes", "No"),
    ("4", "2^2"),
    ("k", "K"),
    ("1", "1e9999999"),
]


@pytest.mark.parametrize(("truth", "answer"), EQUAL)
def test_plain_answers_are_equal_without_a_process(truth: str, answer: str) -> None:
    assert plainly_equal(truth, answer) is True
    assert plainly_equal(answer, truth) is True


@pytest.mark.parametrize(("truth", "answer"), DIFFERENT)
def test_plain_answers_differ_without_a_process(truth: str, answer: str) -> None:
    assert plainly_equal(truth, answer) is False
    assert plainly_equal(answer, truth) is False


@pytest.mark.parametrize(("truth", "answer"), UNDECIDED)
def test_what_needs_algebra_is_left_open(truth: str, answer: str) -> None:
    assert plainly_equal(truth, answer) is None


@given(st.text(max_size=40), st.text(max_size=40))
def test_comparing_any_text_never_raises(truth: str, answer: str) -> None:
    assert plainly_equal(truth, answer) in (True, False, None)


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_integers_are_equal_exactly_when_they_are(a: int, b: int) -> None:
    assert plainly_equal(str(a), f"{b:,}") is (a == b)


def _score(answer: str, truth: str) -> float:
    return math_reward(sample_of(f"thus \\boxed{{{answer}}}", answer=truth)).score


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("2x", "x + x"),
        ("(x+1)^2", "x^2 + 2x + 1"),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
        ("5", "x = 5"),
        ("[0, 1)", r"\left[0, 1\right)"),
        (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty)\cup(-\infty,2)"),
        (r"\{1, 2, 3\}", r"\{3, 2, 1\}"),
        ("e^{2}", r"e \cdot e"),
        (r"\frac{\pi}{2}", r"0.5\pi"),
        ("8", "2^3"),
        (r"\sqrt{12}", r"2\sqrt{3}"),
        ("(1, 2)", r"(1, \frac{4}{2})"),
    ],
)
def test_algebra_finds_equal_answers(truth: str, answer: str) -> None:
    assert _score(answer, truth) == 1


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("2x", "x^2"),
        ("[0, 1)", "(0, 1)"),
        (r"\{1, 2\}", r"\{1, 2, 3\}"),
        ("(1, 2)", "(2, 1)"),
        (r"\sqrt{2}", "1.4"),
        ("5", "5 million"),
        ("Yes", "No"),
        ("x^2", r"\text{I do not know}"),
    ],
)
def test_algebra_keeps_different_answers_apart(truth: str, answer: str) -> None:
    assert _score(answer, truth) == 0


def test_parts_say_what_happened() -> None:
    boxed = math_reward(sample_of(r"\boxed{7}", answer="7"))
    assert (boxed.score, boxed.parts) == (1, {"right": 1, "formatted": 1, "timeout": 0})
    bare = math_reward(sample_of("it is 8", answer="7"))
    assert (bare.score, bare.parts) == (0, {"right": 0, "formatted": 0, "timeout": 0})


def test_a_row_without_an_answer_is_never_right() -> None:
    assert math_reward(sample_of(r"\boxed{}", answer="")).score == 0
    assert math_reward(sample_of("", answer="")).score == 0
