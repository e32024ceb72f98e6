"""Small functions, each with mistakes that can be put into it; tasks of `fix_code`."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def running_max(values: list[int]) -> list[int]:
    """Return for each place the largest of the values up to there."""
    found: list[int] = []
    for value in values:
        if found and found[-1] > value:
            found.append(found[-1])
        else:
            found.append(value)
    return found


def median(values: list[int]) -> float:
    """Return the median; that of an even number of values is the mean of the middle two."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return float(ordered[middle])
    return (ordered[middle - 1] + ordered[middle]) / 2


def count_vowels(text: str) -> int:
    """Return the number of vowels (a, e, i, o, u), in either case."""
    return sum(letter in "aeiou" for letter in text.lower())


def is_palindrome(text: str) -> bool:
    """Return whether the letters and digits read the same backwards; case does not matter."""
    letters = [each.lower() for each in text if each.isalnum()]
    return letters == letters[::-1]


def rotate(values: list[int], steps: int) -> list[int]:
    """Return the values moved to the right by some steps; those that fall out enter on the left."""
    if not values:
        return []
    cut = len(values) - steps % len(values)
    return values[cut:] + values[:cut]


def run_lengths(text: str) -> list[list[object]]:
    """Return each run of equal characters as [character, length]."""
    runs: list[list[Any]] = []
    for letter in text:
        if runs and runs[-1][0] == letter:
            runs[-1][1] += 1
        else:
            runs.append([letter, 1])
    return runs


def digit_sum(number: int) -> int:
    """Return the sum of the decimal digits; the sign does not matter."""
    total, rest = 0, abs(number)
    while rest > 0:
        total += rest % 10
        rest //= 10
    return total


def merge(first: list[int], second: list[int]) -> list[int]:
    """Return the values of two sorted lists as one sorted list."""
    merged: list[int] = []
    i = j = 0
    while i < len(first) and j < len(second):
        if first[i] <= second[j]:
            merged.append(first[i])
            i += 1
        else:
            merged.append(second[j])
            j += 1
    return merged + first[i:] + second[j:]


@dataclass(frozen=True, slots=True)
class Program:
    """Function, the inputs of its tests, and its mistakes."""

    right: Callable[..., Any]
    inputs: Callable[[random.Random], list[Any]]
    """Function that makes the arguments of one test."""
    mistakes: tuple[tuple[str, str], ...]
    """(text of the function, what stands there instead)."""


def _values(dice: random.Random) -> list[int]:
    """Return 1 to 6 random whole numbers."""
    return [dice.randint(-9, 9) for _ in range(dice.randint(1, 6))]


def _text(dice: random.Random) -> str:
    """Return 1 to 8 random letters and marks."""
    return "".join(dice.choice("AaBbeIouUx ,1") for _ in range(dice.randint(1, 8)))


def _mirrored(dice: random.Random) -> str:
    """Return a text that is a palindrome in two of three cases."""
    half = _text(dice)
    return dice.choice([half + ", " + half[::-1].upper(), half + "!" + half[::-1], half])


PROGRAMS = (
    Program(
        running_max,
        lambda dice: [_values(dice)],
        (("> value", "< value"), ("append(found[-1])", "append(found[0])")),
    ),
    Program(
        median,
        lambda dice: [_values(dice)],
        (("sorted(values)", "values"), ("% 2 == 1", "% 2 == 0"), ("[middle - 1]", "[middle + 0]")),
    ),
    Program(
        count_vowels,
        lambda dice: [_text(dice)],
        (('"aeiou"', '"aeio"'), ("text.lower()", "text"), ("letter in", "letter not in")),
    ),
    Program(
        is_palindrome,
        lambda dice: [_mirrored(dice)],
        ((" if each.isalnum()", ""), ("each.lower()", "each"), ("[::-1]", "[::1]")),
    ),
    Program(
        rotate,
        lambda dice: [_values(dice), dice.randint(0, 9)],
        (("% len(values)", "% (len(values) + 1)"), ("len(values) - steps", "steps")),
    ),
    Program(
        run_lengths,
        lambda dice: ["".join(dice.choice("aab") for _ in range(dice.randint(1, 8)))],
        (("+= 1", "= 1"), ("[letter, 1]", "[letter, 0]")),
    ),
    Program(
        digit_sum,
        lambda dice: [dice.randint(-9999, 9999)],
        (("abs(number)", "number"), ("rest > 0", "rest > 9"), ("+= rest % 10", "= rest % 10")),
    ),
    Program(
        merge,
        lambda dice: [sorted(_values(dice)), sorted(_values(dice))],
        (("first[i] <= second[j]", "first[i] >= second[j]"), (" + second[j:]", "")),
    ),
)


@dataclass(frozen=True, slots=True)
class CodeTask:
    """Program to mend."""

    code: str
    """Text of the file, with the mistake."""
    entry: str
    """Name of the function that the tests call."""
    tests: tuple[tuple[list[Any], Any], ...]
    """(arguments, value that the right function returns)."""


def make_task(dice: random.Random, tests: int) -> CodeTask:
    """Return a random program with one mistake, and as many tests for it as `tests` says."""
    program = dice.choice(PROGRAMS)
    before, after = dice.choice(program.mistakes)
    code = inspect.getsource(program.right).replace(before, after, 1)
    inputs = [program.inputs(dice) for _ in range(tests)]
    right = program.right
    return CodeTask(code, right.__name__, tuple((each, right(*each)) for each in inputs))
