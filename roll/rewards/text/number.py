"""The `number` reward: a number within a tolerance of the right one."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation, localcontext

from roll.core.errors import ConfigError, DataError
from roll.core.types import Sample
from roll.rewards.answers.spans import Place, find_span
from roll.rewards.api import Reward
from roll.rewards.thinking import final_text

MAX_CHARS = 1000
"""Largest length of an answer in which a number is looked for, in characters."""
MAX_EXPONENT = 400
"""Largest exponent of ten; numbers beyond are none."""

_NUMBER = re.compile(
    r"(?<![\w.])([-+\u2212]?)[$\u20ac\u00a3]?"
    r"((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE]([-+\u2212]?\d{1,4}))?(?![\d_]|\.\d)"
    r"(?:\s?/\s?(\d{1,30})(?![\d.]))?\s?(\\?%)?",
    re.ASCII,
)


def number_reward(
    sample: Sample, *, absolute: float = 0.0, relative: float = 1e-6, place: Place = "auto"
) -> Reward:
    """Return 1 if the number of the response is close to the right one, else 0.

    Close means: |number - right| <= max(absolute, relative * |right|). The answer of the response
    must have exactly one number: who names several has not answered. `1,234.5`, `-3`, `1e-3`,
    `3/4`, `$5` and `50%` (which is 0.5) are numbers; words around it, such as a unit, are not
    looked at. Infinity and "not a number" are none.

    Args:
        sample: sample to score.
        absolute: largest difference.
        relative: largest difference as a share of the right number.
        place: where the answer stands; see `roll.rewards.answers.spans.find_span`. In `auto`, a
            response without tag, box and "answer:" must consist of one number and words.

    Parts: `found`, 1 if there was one number; `formatted`, 1 if a tag or a box marked it.

    Raises:
        DataError: the answer of the row is not one number.
    """
    right = parse_number(sample.answer.rpartition("####")[2])
    if right is None and sample.answer.strip():
        raise DataError(
            f"row {sample.prompt.id}: the answer {sample.answer!r:.60} is not one number"
        )
    final = final_text(sample.response_text, prompt=sample.prompt.text)
    span = None if final is None else find_span(final, place, truncated=sample.truncated)
    number = parse_number(span.text) if span else None
    close = False
    if number is not None and right is not None:
        with localcontext(prec=1000):
            limit = max(Decimal(absolute), Decimal(relative) * abs(right))
            close = abs(number - right) <= limit
    parts = {"found": float(number is not None), "formatted": float(bool(span and span.formatted))}
    return Reward(float(close), parts)


def parse_number(text: str) -> Decimal | None:
    """Return the only number in a text, with 0.5 for 50%; None if there is none, or several."""
    if len(text) > MAX_CHARS:
        return None
    found = list(_NUMBER.finditer(text))
    if len(found) != 1:
        return None
    sign, digits, exponent, divisor, percent = found[0].groups()
    try:
        with localcontext(prec=1000):
            number = Decimal(digits.replace(",", ""))
            number = number.scaleb(int((exponent or "0").replace("\u2212", "-")))
            number = number / Decimal(divisor or 1) / (100 if percent else 1)
    except (InvalidOperation, ZeroDivisionError):
        return None
    if not number.is_finite() or abs(number.adjusted()) > MAX_EXPONENT:
        return None
    return -number if sign in ("-", "\u2212") else number


def check_number(absolute: float = 0.0, relative: float = 1e-6, **_: object) -> None:
    """Raise ConfigError if a tolerance is negative or infinite."""
    for name, value in (("absolute", absolute), ("relative", relative)):
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{name} is {value:g}; expected a number from 0")
