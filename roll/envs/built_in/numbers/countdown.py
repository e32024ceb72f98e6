"""`countdown`: reach a number by an expression of given numbers."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from typing import Any

from roll.envs.built_in.commands import last_command
from roll.envs.built_in.numbers.arithmetic import ArithmeticProblemError, evaluate, shown

SMALL = range(1, 11)
LARGE = (25, 50, 75, 100)
TRIES = 1000


class Countdown:
    """Numbers game. A turn is an expression with + - * / and brackets on the last line.

    A wrong turn is told its value, and the next turn may try again. The reward is 1 for an
    expression that has the value and uses the numbers as demanded, 0 before. Tasks follow from the
    seed, or from a data row with the columns `nums` (or `numbers`) and `target`.

    Args:
        numbers: how many numbers are given.
        lowest: smallest number to reach, in tasks of seeds.
        highest: largest one.
        large: share of the given numbers that are 25, 50, 75 or 100; the others are 1 to 10.
        use_all: True: each number must be used once; False: at most once.
        rules: explain the game in the first observation.
    """

    def __init__(
        self,
        numbers: int = 4,
        lowest: int = 10,
        highest: int = 100,
        large: float = 0.2,
        use_all: bool = True,
        rules: bool = True,
    ) -> None:
        """Take the arguments, which the class describes; ValueError for one that is out of its
        range."""
        if numbers < 2 or not 1 <= lowest <= highest or not 0 <= large <= 1:
            raise ValueError(
                f"numbers = {numbers} must be at least 2, lowest = {lowest} from 1 to highest = "
                f"{highest}, large = {large:g} from 0 to 1"
            )
        self.numbers = numbers
        self.lowest = lowest
        self.highest = highest
        self.large = large
        self.use_all = use_all
        self.rules = rules
        self._invalid = 0
        self._won = False
        self._last = ""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        given = options or {}
        column = next((name for name in ("nums", "numbers") if name in given), None)
        if column is not None:
            if "target" not in given:
                raise ValueError(f"the row has {column} and no `target`; found {sorted(given)}")
            self._given, self._target = [int(each) for each in given[column]], int(given["target"])
        else:
            self._given, self._target = self._make(random.Random(seed))
        once = "once" if self.use_all else "at most once"
        rules = (
            f"Make an expression of the given numbers that has the wanted value. Use each number "
            f"{once}, with + - * / and brackets. Answer with the expression on the last line.\n"
        )
        task = f"Numbers: {', '.join(map(str, self._given))}. Wanted: {self._target}."
        return (rules if self.rules else "") + task, self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        line = action.strip().rpartition("\n")[2]
        command = last_command(line, ("answer",))
        written = (command[1] if command else line).partition("=")[0].strip(" `$")
        try:
            found = evaluate(written, signs="+-*/")
        except ArithmeticProblemError as error:
            self._invalid += 1
            return f"I cannot read that: {error}.", 0.0, False, False, self._info()
        wrong = self._misused(found.numbers)
        if wrong:
            self._invalid += 1
            return wrong, 0.0, False, False, self._info()
        self._last = shown(found.value, 4)
        self._won = found.value == self._target
        said = f"That is {self._last}" + (", right." if self._won else f", not {self._target}.")
        return said, float(self._won), self._won, False, self._info()

    def close(self) -> None:
        """Do nothing: there are no resources."""

    def _misused(self, used: tuple[Fraction, ...]) -> str:
        """Return what is wrong with the numbers of an expression; empty if nothing is."""
        have, want = Counter(used), Counter(map(Fraction, self._given))
        extra = sorted((have - want).keys())
        if extra:
            return f"{shown(extra[0])} is not given, or not so often."
        lacking = sorted((want - have).keys())
        if lacking and self.use_all:
            return f"{shown(lacking[0])} must be used, too."
        return ""

    def _info(self) -> dict[str, Any]:
        """Return the `info` of `reset` and `step`; `state` is the last value that was reached."""
        return {"success": self._won, "invalid": self._invalid, "state": self._last}

    def _make(self, dice: random.Random) -> tuple[list[int], int]:
        """Return numbers, and one that they can make with all of them; ValueError if none is
        found."""
        for _ in range(TRIES):
            given = [
                dice.choice(LARGE) if dice.random() < self.large else dice.choice(SMALL)
                for _ in range(self.numbers)
            ]
            target = _combined(dice, given)
            if target is not None and self.lowest <= target <= self.highest:
                return given, target
        raise ValueError(
            f"no task was found with {self.numbers} numbers and a value from {self.lowest} to "
            f"{self.highest}; allow a wider range"
        )


def _combined(dice: random.Random, given: list[int]) -> int | None:
    """Return the value of a random expression of all numbers; None if it is not whole."""
    values = [Fraction(each) for each in given]
    while len(values) > 1:
        left, right = (values.pop(dice.randrange(len(values))) for _ in range(2))
        sign = dice.choice("+-*/")
        if sign == "/" and (right == 0 or (left / right).denominator != 1):
            sign = "+"
        results = {"+": left + right, "-": left - right, "*": left * right}
        values.append(left / right if sign == "/" else results[sign])
    return values[0].numerator if values[0].denominator == 1 else None
