"""Comparison of two answers without computer algebra: as text, plain numbers, or lists of both.

The comparison decides nearly all ordinary answers in microseconds and is safe on any input.
Undecided answers (None) go to a child process.
"""

from __future__ import annotations

import re

from roll.rewards.math.matching import compare
from roll.rewards.math.notation import tidy
from roll.rewards.math.numerals import read_number, same_number
from roll.rewards.math.shapes import read_shape

MAX_SHAPE_CHARS = 4000
"""Largest length of an answer that is split into elements, in characters; longer answers are
compared only as text, and then by algebra."""

_CLOCK = re.compile(
    r"(?P<hour>\d{1,2})(?::(?P<minute>\d\d)(?::(?P<second>\d\d))?)? ?"
    r"(?P<half>a\.?m\.?|p\.?m\.?|A\.?M\.?|P\.?M\.?|hours)?"
)
_RATIO = re.compile(r"\d+(?:\.\d+)?(?::\d+(?:\.\d+)?)+")
_COLON_CHARS = 40
MAX_POINTS = 6
"""Largest number of capital letters in a row that may be names of points (ABC)."""
_CAPITAL_WORDS_TEXT = "YES NO TRUE FALSE DNE EVEN ODD NONE BOTH NEVER ALWAYS ALL"
_CAPITAL_WORDS = frozenset(_CAPITAL_WORDS_TEXT.split())


def plainly_equal(truth: str, answer: str) -> bool | None:
    """Return whether two answers are equal as text or as numbers; None if undecided.

    Example: plainly_equal("1/2", "0.5") is True; plainly_equal("2", "3") is False;
    plainly_equal("2x", "x + x") is None.
    """
    left, right = tidy(truth), tidy(answer)
    if left == right:
        return bool(left)
    if not left or not right:
        return False
    if max(len(left), len(right)) > MAX_SHAPE_CHARS:
        return None
    try:
        return compare(read_shape(left), read_shape(right), plain_leaf)
    except RecursionError:
        return None  # hundreds of brackets in each other


def plain_leaf(left: str, right: str) -> bool | None:
    """Compare two tidied elements as text, words, times of day, ratios and numbers; None if
    undecided."""
    if left == right or _same_words(left, right):
        return True
    if ":" in left + right:
        found = _same_colons(left, right)
        if found is not None:
            return found
    a, b = read_number(left), read_number(right)
    return None if a is None or b is None else same_number(a, b)


def _same_words(left: str, right: str) -> bool:
    """Return whether two texts are equal words (Yes, true, even), in small or capital letters."""
    # A single letter may be a variable, and k differs from K.
    words = all(len(text) > 1 and text.replace(" ", "").isalpha() for text in (left, right))
    return words and left.lower() == right.lower() and _is_word(left) and _is_word(right)


def _is_word(text: str) -> bool:
    """Return whether letters are a word and not names of points (ABC)."""
    return not text.isupper() or len(text) > MAX_POINTS or text in _CAPITAL_WORDS


def _same_colons(left: str, right: str) -> bool | None:
    """Compare two texts as times of day, or as ratios whose terms are proportional; None if they
    are too long or neither."""
    if max(len(left), len(right)) > _COLON_CHARS:
        return None
    first, second = _CLOCK.fullmatch(left), _CLOCK.fullmatch(right)
    if first and second and (first["minute"] or second["minute"]):
        known = all(m["minute"] or m["half"] for m in (first, second))
        return _same_time(first, second) if known else None
    a, b = _ratio(left), _ratio(right)
    if a is None or b is None or len(a) != len(b):
        return None if a is None or b is None else False
    return all(x * b[0] == y * a[0] for x, y in zip(a, b, strict=True))


def _same_time(a: re.Match[str], b: re.Match[str]) -> bool:
    """Return whether two times of day are equal; one before 13:00 without am or pm may be in either
    half of the day."""
    (x, x_half), (y, y_half) = _seconds(a), _seconds(b)
    if x_half == y_half:
        return x == y
    return x == y or (
        (x_half is None or y_half is None)
        and x % 43200 == y % 43200
        and ((x if x_half is None else y) < 46800)
    )


def _seconds(match: re.Match[str]) -> tuple[int, str | None]:
    """Return a time of day in seconds, and "a" (am), "p" (pm) or None."""
    hour, half = int(match["hour"]), (match["half"] or "").lower()[:1]
    if half in ("a", "p"):
        hour = hour % 12 + (12 if half == "p" else 0)
    total = hour * 3600 + int(match["minute"] or 0) * 60 + int(match["second"] or 0)
    return total, half if half in ("a", "p") else None


def _ratio(text: str):  # type: ignore[no-untyped-def]
    """Return the terms of a ratio such as 3:4, none of them 0, or numerator and denominator of a
    number without unit or percent sign; else None."""
    if _RATIO.fullmatch(text):
        terms = [read_number(term) for term in text.split(":")]
        return [t.value for t in terms] if all(t and t.value for t in terms) else None  # type: ignore[union-attr]
    number = read_number(text)
    if number is None or number.unit or number.percent:
        return None
    return [number.value.numerator, number.value.denominator]
