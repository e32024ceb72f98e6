"""Which answers the math reward holds for equal: a table of spellings, and exact numbers."""

# ruff: noqa: RUF001

import random
from collections.abc import Callable
from fractions import Fraction

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy.physics import units as si

from roll.core.types import Sample
from roll.rewards.contract import sample_of
from roll.rewards.execution.child_pool import NoChildFreeError
from roll.rewards.math.equivalence import make_checker
from roll.rewards.math.notation import tidy
from roll.rewards.math.plain_equivalence import plainly_equal
from roll.rewards.math.reward import CachedChecks, NoVerdictError, judge
from tests.unit.verifiers.math_answers import FAMILIES, different_pairs, equal_pairs

Equal = Callable[[str, str], bool]


@pytest.fixture(scope="module")
def equal() -> Equal:
    """The whole decision of the reward, its algebra in this process."""
    check = make_checker()

    def decide(truth: str, answer: str) -> bool:
        plain = plainly_equal(truth, answer)
        return check((truth, answer)) if plain is None else plain

    return decide


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_spellings_of_one_answer_are_equal_and_others_are_not(family: str, equal: Equal) -> None:
    wrong = [
        (truth, answer, "not equal")
        for name, a, b in equal_pairs()
        for truth, answer in ((a, b), (b, a))
        if name == family and not equal(truth, answer)
    ] + [
        (truth, answer, "equal")
        for name, a, b in different_pairs()
        for truth, answer in ((a, b), (b, a))
        if name == family and equal(truth, answer)
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("It is √2.", r"\sqrt{2}"),
        ("We get $2\\sqrt{3}$.", r"\sqrt{12}"),
        ("about 12 million people.", "12000000"),
        ("she needs 2 1/3 cups", "7/3"),
        ("It begins at 10:30.", "10:30"),
        ("It begins at 10:30 p.m.", "22:30"),
        (r"so $0.\overline{3}$.", "1/3"),
        ("it is −5 now", "-5"),
        (r"thus $2\frac{1}{3}$", "7/3"),
        ("in base eight: 2516_8", "2516_8"),
        ("it is 12\u202f345.", "12345"),
        (r"The answer is $\frac{-3}{4}$", "-3/4"),
        (r"The answer is $-\frac{3}{4}$.", "-3/4"),
        (r"so $\frac{3}{\sqrt{2}}$.", r"\frac{3\sqrt{2}}{2}"),
        (r"so $\frac{\sqrt{3}}{2}$.", r"\frac{\sqrt{3}}{2}"),
        (r"so $\frac{3\pi}{4}$.", r"\frac{3\pi}{4}"),
        (r"so $\cfrac34$.", "3/4"),
        ("it is 12 345.", "12345"),
        ("in 2024 1/2 of them", "1/2"),
        ("So the total is $12{,}345$.", "12345"),
        (r"So the total is $1,\!234,\!567$.", "1234567"),
        (r"So it is $12\,345.5$", "12345.5"),
        (r"about $3 \times 10^{8}$ m/s", "3e8"),
        ("about 3 × 10⁸", "300000000"),
    ],
)
def test_an_answer_without_a_box_is_read_whole(response: str, truth: str, equal: Equal) -> None:
    assert judge(sample_of(response, answer=truth), equal).score == 1


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("It is √2.", "2"),
        ("12 million", "12"),
        ("5 squared", "5"),
        ("at 10:30", "30"),
        ("2516_9", "2516_8"),
        (r"$\sqrt{3}$", "3"),
        (r"The answer is $\frac{-3}{4}$", "4"),
        (r"so $\frac{3}{\sqrt{2}}$.", r"\sqrt{2}"),
        (r"so $\frac{x}{4}$.", "4"),
        ("it is 12 345.", "345"),
        ("in 2024 1/2 of them", "2024.5"),
        ("So the total is $12{,}345$.", "345"),
        (r"about $3\times10^{8}$", "8"),
    ],
)
def test_a_piece_of_an_answer_without_a_box_is_not_the_answer(
    response: str, truth: str, equal: Equal
) -> None:
    assert judge(sample_of(response, answer=truth), equal).score == 0


fractions = st.fractions(min_value=-50, max_value=50, max_denominator=60)


@given(fractions, fractions)
def test_a_fraction_equals_its_spellings_and_no_other_number(a: Fraction, b: Fraction) -> None:
    for spelling in _spellings(a):
        assert plainly_equal(spelling, str(b)) is (a == b), spelling
        assert plainly_equal(str(b), spelling) is (a == b), spelling


@given(st.integers(0, 10**6), st.integers(2, 10), st.integers(2, 10))
def test_a_base_is_part_of_the_number(value: int, base: int, other: int) -> None:
    digits = _in_base(value, base)
    assert plainly_equal(f"{digits}_{base}", str(value)) is True
    if all(int(digit) < other for digit in digits):
        same = int(digits, other) == value
        assert plainly_equal(f"{digits}_{{{other}}}", f"{digits}_{base}") is same


LENGTHS = {"cm": si.cm, "m": si.m, "km": si.km, "inches": si.inch, "feet": si.ft, "miles": si.mi}
TIMES = {"seconds": si.s, "minutes": si.minute, "hours": si.hour, "days": si.day}


@pytest.mark.parametrize("table", [LENGTHS, TIMES])
def test_units_convert_as_in_sympy(table: dict[str, sympy.Expr]) -> None:
    for name, unit in table.items():
        for other, into in table.items():
            size = Fraction(str(sympy.nsimplify(si.convert_to(unit, into) / into)))
            assert plainly_equal(f"12 {name}", f"{12 * size} {other}") is True
            assert plainly_equal(f"12 {name}", f"{13 * size} {other}") is False
    assert plainly_equal("3 m", "3 s") is False


@settings(max_examples=30)
@given(st.integers(0, 2**32))
def test_expressions_are_equal_where_their_values_are(equal: Equal, seed: int) -> None:
    dice = random.Random(seed)
    x = sympy.Symbol("x")
    left = sum(dice.randint(-3, 3) * x**k for k in range(3)) + dice.choice(
        [0, 1 / x, sympy.sqrt(2)]
    )
    right = dice.choice([sympy.expand(left * (x + 1)) / (x + 1), left + dice.choice([0, 1, x])])
    at = {x: sympy.Rational(7, 3)}
    same = abs(sympy.N((left - right).subs(at), 30)) < 1e-20
    # One point is enough of an oracle: the differences that are made here are 1 and x.
    assert equal(sympy.latex(left), sympy.latex(right)) is bool(same)


@given(st.text(max_size=60))
def test_any_text_is_tidied_and_what_is_tidy_stays_equal_to_itself(text: str) -> None:
    assert plainly_equal(text, text) is bool(tidy(text))


def test_a_hostile_text_is_tidied_and_read_in_no_time() -> None:
    for text in (
        "{" * 5000,
        "\\frac{" * 2000,
        "1," * 5000,
        "(" * 4000 + ")" * 4000,
        "\\text{" * 3000,
    ):
        assert plainly_equal(text, "5") in (False, None)


def test_a_check_without_a_verdict_is_asked_again() -> None:
    asked = []

    def ask(truth: str, answer: str) -> bool:
        asked.append(answer)
        if len(asked) == 1:
            raise NoVerdictError("the call ran out of time")
        return True

    equivalent = CachedChecks(ask)
    sample = sample_of(r"\boxed{1 + y}", answer="y + 1")
    first, second, third = (judge(sample, equivalent) for _ in range(3))
    assert (first.score, first.parts["timeout"]) == (0, 1)
    assert (second.score, second.parts["timeout"]) == (third.score, 0) == (1, 0)
    assert len(asked) == 2


def test_a_stalled_check_is_a_failure_and_not_a_wrong_answer() -> None:
    def stalled(truth: str, answer: str) -> bool | None:
        raise NoChildFreeError("the machine is busy")

    sample: Sample = sample_of(r"\boxed{x + 1}", answer="1 + x")
    with pytest.raises(TimeoutError):
        judge(sample, stalled)


def _spellings(value: Fraction) -> list[str]:
    sign, size = ("-" if value < 0 else ""), abs(value)
    whole, rest = divmod(size.numerator, size.denominator)
    found = [
        str(value),
        f"{sign}\\frac{{{size.numerator}}}{{{size.denominator}}}",
        f"{sign}\\dfrac{{{2 * size.numerator}}}{{{2 * size.denominator}}}".replace("-", "\u2212"),
        f"${sign}{size.numerator}/{size.denominator}$",
        f"{sign}{_repeating(size)}",
        f"x = {value} cm",
    ]
    if whole and rest:
        found += [
            f"{sign}{whole} {rest}/{size.denominator}",
            f"{sign}{whole}\\frac{{{rest}}}{{{size.denominator}}}",
        ]
    return found


def _repeating(value: Fraction) -> str:
    """Long division by hand: digits until a remainder comes back."""
    whole, rest = divmod(value.numerator, value.denominator)
    digits, seen = "", {}
    while rest and rest not in seen:
        seen[rest] = len(digits)
        digit, rest = divmod(rest * 10, value.denominator)
        digits += str(digit)
    if not rest:
        return f"{whole}.{digits}" if digits else str(whole)
    start = seen[rest]
    return f"{whole}.{digits[:start]}\\overline{{{digits[start:]}}}"


def _in_base(value: int, base: int) -> str:
    digits = ""
    while value or not digits:
        value, digit = divmod(value, base)
        digits = str(digit) + digits
    return digits


@pytest.mark.parametrize("text", ["$" + " " * 100_000 + "x", "\\sin" + " " * 100_000 + "3"])
def test_long_runs_of_blanks_are_one_blank(text: str) -> None:
    """A pattern that tried each of them would take minutes."""
    assert tidy(text) == tidy(" ".join(text.split()))
