"""`calculator`: answer a question about numbers with the help of a calculator."""

from __future__ import annotations

import random
import re
from fractions import Fraction
from typing import Any

from roll.envs.built_in.commands import last_command
from roll.envs.built_in.numbers.arithmetic import ArithmeticProblemError, evaluate, shown

_NUMBER = r"(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_RESULT = re.compile(rf"[-+\u2212]?\s*{_NUMBER}(?:\s*[/\u00f7]\s*{_NUMBER})?")
"""Answer with a value: a number, or a fraction of two."""


class Calculator:
    """Question with a calculator. A turn ends with a line `calculate: EXPRESSION`, which is told
    the value, or `answer: ...`, which ends the episode.

    The reward is 1 for the right answer, 0 otherwise. Tasks follow from the seed, or from a data
    row with the columns `question` (or `prompt`) and `answer`. An answer is right if it is a
    number or fraction of the same value, or the same text.

    Args:
        digits: number of digits of the numbers, in tasks of seeds.
        operations: number of operations.
        tolerance: largest relative difference of an answer that counts as right.
        rules: explain the commands in the first observation.
    """

    def __init__(
        self, digits: int = 3, operations: int = 3, tolerance: float = 1e-6, rules: bool = True
    ) -> None:
        """Take the arguments, which the class describes; ValueError for one that is out of its
        range."""
        if not 1 <= digits <= 9 or not 1 <= operations <= 20 or tolerance < 0:
            raise ValueError(
                f"digits = {digits} must be from 1 to 9, operations = {operations} from 1 to 20, "
                f"tolerance = {tolerance:g} at least 0"
            )
        self.digits = digits
        self.operations = operations
        self.tolerance = Fraction(tolerance)
        self.rules = rules
        self._invalid = 0
        self._calculations = 0
        self._won = False
        self._state = ""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        given = options or {}
        column = next((name for name in ("question", "prompt") if name in given), None)
        if column is not None:
            if "answer" not in given:
                raise ValueError(f"the row has {column} and no `answer`; found {sorted(given)}")
            question, self._answer = str(given[column]), str(given["answer"])
        else:
            question, self._answer = self._make(random.Random(seed))
        rules = (
            "Answer the question. A line `calculate: 12 * (3 + 4)` asks the calculator; a line "
            "`answer: 84` gives your answer. End each turn with one of them.\n"
        )
        return (rules if self.rules else "") + question, self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        command = last_command(action, ("calculate", "answer"))
        if command is None:
            self._invalid += 1
            said = "Write `calculate: ...` or `answer: ...`."
            return said, 0.0, False, False, self._info()
        name, argument = command
        if name == "answer":
            self._won = self._is_right(argument)
            said = "Right." if self._won else "Wrong."
            return said, float(self._won), True, False, self._info()
        try:
            said = shown(evaluate(argument.removesuffix("=").rstrip()).value)
        except ArithmeticProblemError as error:
            self._invalid += 1
            said = f"Error: {error}."
        else:
            self._calculations += 1
        self._state = said
        return said, 0.0, False, False, self._info()

    def close(self) -> None:
        """Do nothing: there are no resources."""

    def _is_right(self, answer: str) -> bool:
        """Return whether an answer has the value of the right one, or is the same text. Only what
        is a result has a value: the expression of the question is none, or to repeat it would be
        the answer."""
        said, right = (_plain(each) for each in (answer, self._answer))
        if _RESULT.fullmatch(said) is None:
            return bool(said) and said == right
        try:
            found, wanted = evaluate(said).value, evaluate(right).value
        except ArithmeticProblemError:
            return bool(said) and said == right
        return abs(found - wanted) <= self.tolerance * abs(wanted)

    def _info(self) -> dict[str, Any]:
        """Return the `info` of `reset` and `step`; `state` is the last result or error of the
        calculator."""
        return {
            "success": self._won,
            "calculations": self._calculations,
            "invalid": self._invalid,
            "state": self._state,
        }

    def _make(self, dice: random.Random) -> tuple[str, str]:
        """Return a question and its answer."""
        text = self._number(dice)
        for _ in range(self.operations):
            sign = dice.choice("+-*")
            number = self._number(dice)
            text = f"({text}) {sign} {number}" if sign == "*" else f"{text} {sign} {number}"
        return f"What is {text}?", shown(evaluate(text).value)

    def _number(self, dice: random.Random) -> str:
        return str(dice.randrange(10 ** (self.digits - 1), 10**self.digits))


def _plain(text: str) -> str:
    """Return an answer without what often stands around it."""
    return " ".join(text.casefold().lstrip(" $*`").rstrip(" .$*`").split())
