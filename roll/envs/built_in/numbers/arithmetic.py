"""Exact values of arithmetic expressions, which are parsed here and never run as code."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 500
MAX_DEPTH = 50
MAX_BITS = 4000
"""Size of the numerator and the denominator of every value."""
MAX_EXPONENT = 100
_TOKEN = re.compile(r"\s*(\*\*|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|[-+*/^()%])")
_SIGNS = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-"})


class ArithmeticProblemError(ValueError):
    """Error: a text is no expression, or has no value; its text says why, for the policy."""


@dataclass(frozen=True, slots=True)
class Value:
    """Value of an expression."""

    value: Fraction
    numbers: tuple[Fraction, ...]
    """Numbers that the expression contains, from left to right."""


def evaluate(text: str, signs: str = "+-*/%^") -> Value:
    """Return the value of an expression of numbers, signs and brackets.

    Args:
        text: the expression; `,` may separate thousands.
        signs: those that are allowed of `+ - * / % ^`; `**` is another form of `^`.

    Raises:
        ArithmeticProblemError: it is no such expression, is too long, divides by zero, or a value
            is too large.
    """
    if len(text) > MAX_CHARS:
        raise ArithmeticProblemError(f"the expression is longer than {MAX_CHARS} characters")
    tokens = _tokens(re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text))
    foreign = next((each for each in tokens if each in "+-*/%^" and each not in signs), None)
    if foreign is not None:
        raise ArithmeticProblemError(f"{foreign} is not allowed here")
    parser = _Parser(tokens)
    value = parser.sum(0)
    if parser.rest:
        raise ArithmeticProblemError(f"there is {parser.rest[0]!r} where the expression should end")
    return Value(value, tuple(parser.numbers))


def shown(value: Fraction, digits: int = 10) -> str:
    """Return a value as text: whole, or as a decimal number with at most `digits` digits behind the
    point."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(abs(value) * 10**digits)
    whole, part = divmod(scaled, 10**digits)
    sign = "-" if value < 0 and scaled else ""
    return f"{sign}{whole}.{part:0{digits}d}".rstrip("0").rstrip(".")


def _tokens(text: str) -> list[str]:
    """Split an expression into numbers, signs and brackets; ArithmeticProblemError if it has
    anything else, or is empty."""
    text, at, found = text.translate(_SIGNS).strip(), 0, []
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise ArithmeticProblemError(f"{text[at : at + 10].strip()!r} is no arithmetic")
        found.append("^" if token[1] == "**" else token[1])
        at = token.end()
    if not found:
        raise ArithmeticProblemError("the expression is empty")
    return found


class _Parser:
    """Parser by recursive descent."""

    def __init__(self, tokens: list[str]) -> None:
        self.rest = tokens
        self.numbers: list[Fraction] = []

    def sum(self, depth: int) -> Fraction:
        """Take a sum from the front of `rest` and return its value; `depth` counts nested
        brackets."""
        return self._chain(self._product, ("+", "-"), depth)

    def _product(self, depth: int) -> Fraction:
        """Take a product from the front of `rest` and return its value."""
        return self._chain(self._signed, ("*", "/", "%"), depth)

    def _chain(
        self, part: Callable[[int], Fraction], signs: tuple[str, ...], depth: int
    ) -> Fraction:
        """Return the value of parts that are joined by operators of equal rank."""
        value = part(depth)
        while self.rest and self.rest[0] in signs:
            value = _applied(self.rest.pop(0), value, part(depth))
        return value

    def _signed(self, depth: int) -> Fraction:
        """Return the value of a power with any number of signs before it. `depth` counts nested
        brackets and signs."""
        if depth > MAX_DEPTH:
            raise ArithmeticProblemError(f"brackets or signs are nested deeper than {MAX_DEPTH}")
        if self.rest and self.rest[0] in ("+", "-"):
            sign = self.rest.pop(0)
            value = self._signed(depth + 1)
            return -value if sign == "-" else value
        return self._power(depth)

    def _power(self, depth: int) -> Fraction:
        """Take a number or bracket, perhaps with an exponent, and return its value."""
        base = self._atom(depth)
        if self.rest and self.rest[0] == "^":
            self.rest.pop(0)
            return _raised(base, self._signed(depth + 1))
        return base

    def _atom(self, depth: int) -> Fraction:
        """Return the value of the next number or bracket, and note the number in `numbers`."""
        if not self.rest:
            raise ArithmeticProblemError("the expression is not complete")
        token = self.rest.pop(0)
        if token == "(":
            value = self.sum(depth + 1)
            if not self.rest or self.rest.pop(0) != ")":
                raise ArithmeticProblemError("a bracket is not closed")
            return value
        if token[0] not in "0123456789.":
            raise ArithmeticProblemError(f"there is {token!r} where a number should be")
        self.numbers.append(_limited(Fraction(token)))
        return self.numbers[-1]


def _applied(sign: str, left: Fraction, right: Fraction) -> Fraction:
    """Return the result of `+`, `-`, `*`, `/` or `%`; ArithmeticProblemError if it is too large or
    undefined."""
    if sign == "+":
        return _limited(left + right)
    if sign == "-":
        return _limited(left - right)
    if sign == "*":
        return _limited(left * right)
    if right == 0:
        raise ArithmeticProblemError("division by zero")
    return _limited(left / right if sign == "/" else left % right)


def _raised(base: Fraction, exponent: Fraction) -> Fraction:
    """Return a power; ArithmeticProblemError if the exponent is not whole, or the value is
    undefined or too large to compute."""
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ArithmeticProblemError(
            f"an exponent must be a whole number of at most {MAX_EXPONENT}"
        )
    if base == 0 and exponent < 0:
        raise ArithmeticProblemError("division by zero")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent.numerator) > MAX_BITS:
        raise ArithmeticProblemError("the value is too large")
    return _limited(base**exponent.numerator)


def _limited(value: Fraction) -> Fraction:
    """Return the value; ArithmeticProblemError if it has more than `MAX_BITS`."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ArithmeticProblemError("the value is too large")
    return value
