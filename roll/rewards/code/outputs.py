"""Comparison of what a program wrote with what it should have written."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import model_validator

from roll.config.base import Config

Kind = Literal["exact", "tokens", "numbers", "checker"]


class Comparison(Config):
    """Rule by which outputs are compared."""

    kind: Kind = "tokens"
    """`exact`: equal but for white space at the end; `tokens`: the same words, whatever white space
    is between them; `numbers`: the same words, where numbers may differ by the tolerance unless
    both are whole; `checker`: the program in the column `checker` of the row decides."""
    absolute: float | None = None
    """Largest difference of two numbers. Left out: 1e-6."""
    relative: float | None = None
    """Largest difference of two numbers, as a share of the right one. Left out: 1e-6."""

    @model_validator(mode="after")
    def _tolerance_of_numbers(self) -> Self:
        given = [each for each in (self.absolute, self.relative) if each is not None]
        if given and self.kind != "numbers":
            raise ValueError(f"`absolute` and `relative` concern `numbers`, not {self.kind!r}")
        if any(each < 0 for each in given):
            raise ValueError("`absolute` and `relative` must not be negative")
        return self


_LONGEST_NUMBER = 400
"""Characters of a token that is read as a number; a double never needs as many."""


def same_output(found: str, expected: str, how: Comparison) -> bool:
    """Return whether an output is right by the rule `how`, whose kind must not be `checker`."""
    if how.kind == "exact":
        return found.rstrip() == expected.rstrip()
    mine, right = found.split(), expected.split()
    if mine == right:
        return True
    if how.kind == "tokens" or len(mine) != len(right):
        return False
    absolute = 1e-6 if how.absolute is None else how.absolute
    relative = 1e-6 if how.relative is None else how.relative
    return all(_close(a, b, absolute, relative) for a, b in zip(mine, right, strict=True))


def _close(found: str, right: str, absolute: float, relative: float) -> bool:
    """Return whether two tokens are equal, or finite numbers that are close."""
    if found == right:
        return True
    if max(len(found), len(right)) > _LONGEST_NUMBER or "_" in found or not found.isascii():
        return False
    try:
        if _is_whole(found) and _is_whole(right):  # a tolerance would forgive an error of one
            return int(found) == int(right)
        a, b = float(found), float(right)
    except (ValueError, OverflowError):
        return False
    if not (math.isfinite(a) and math.isfinite(b)):
        return False
    return abs(a - b) <= max(absolute, relative * abs(b))


def _is_whole(text: str) -> bool:
    return text.lstrip("+-").isdigit()
