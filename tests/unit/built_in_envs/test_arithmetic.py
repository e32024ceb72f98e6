"""Expressions have the value that Python gives them; nothing in them runs, and none is too much."""

from __future__ import annotations

import re
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.envs.built_in.numbers.arithmetic import ArithmeticProblemError, evaluate, shown

numbers = st.integers(0, 99).map(str)
expressions = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/%"), inner).map(" ".join),
        inner.map(lambda each: f"({each})"),
        inner.map(lambda each: f"-({each})"),
    ),
    max_leaves=12,
)


@given(expressions)
def test_values_are_those_of_python(text: str) -> None:
    exact = re.sub(r"\d+", lambda number: f"Fraction({number[0]})", text)
    try:
        value = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ArithmeticProblemError, match="division by zero"):
            evaluate(text)
        return
    found = evaluate(text)
    assert found.value == value
    assert [str(each) for each in found.numbers] == [
        str(int(each)) for each in re.findall(r"\d+", text)
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 ** 3 ** 2", "512"),
        ("-2 ^ 2", "-4"),
        ("2 ** -2", "0.25"),
        ("1,234,567 + 1", "1234568"),
        ("7 \u00d7 8 \u00f7 2", "28"),
        ("1 / 3", "0.3333333333"),
        (".5 + 1.25", "1.75"),
        ("-1 / 8", "-0.125"),
        ("2 / 3 - 1", "-0.3333333333"),
        ("1 / 10 ** 20", "0"),
        ("10", "10"),
    ],
)
def test_values_are_shown_as_people_write_them(text: str, value: str) -> None:
    assert shown(evaluate(text).value) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("1 +", "not complete"),
        ("(1", "not closed"),
        ("1 2", "'2' where the expression should end"),
        ("* 2", "where a number should be"),
        ("abs(1)", "is no arithmetic"),
        ("__import__('os')", "is no arithmetic"),
        ("1 / (2 - 2)", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "at most 100"),
        ("((9 ** 99) ** 99) ** 99", "too large"),
        ("2 ** 0.5", "whole number"),
        ("(" * 60 + "1" + ")" * 60, "nested deeper"),
        ("-" * 60 + "1", "nested deeper"),
        ("9" * 501, "longer than 500"),
        ("\u0661 + \u0662", "is no arithmetic"),
    ],
)
def test_what_has_no_value_is_told(text: str, message: str) -> None:
    begun = time.process_time()
    with pytest.raises(ArithmeticProblemError, match=re.escape(message)):
        evaluate(text)
    assert time.process_time() - begun < 0.5


@pytest.mark.parametrize("text", ["2 ** 3", "2 ^ 3", "7 % 2"])
def test_only_the_allowed_signs_are_taken(text: str) -> None:
    evaluate(text)
    with pytest.raises(ArithmeticProblemError, match="is not allowed here"):
        evaluate(text, signs="+-*/")
