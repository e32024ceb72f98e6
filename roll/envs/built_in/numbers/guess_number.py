"""`guess_number`: find a number by guesses, told each time whether it is larger or smaller."""

from __future__ import annotations

import random
import re
from typing import Any


class GuessNumber:
    """Number from 1 to `most`. A turn is a guess; the last whole number in it counts.

    The reward is 1 for the right guess, 0 before.

    Args:
        most: largest number.
        rules: explain the game in the first observation.
    """

    def __init__(self, most: int = 100, rules: bool = True) -> None:
        """Take the arguments, which the class describes; ValueError for one that is out of its
        range."""
        if most < 1:
            raise ValueError(f"most = {most} must be at least 1")
        self.most = most
        self.rules = rules
        self._invalid = 0
        self._won = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._number = random.Random(seed).randint(1, self.most)
        self._low, self._high = 1, self.most
        rules = (
            "I think of a whole number. Answer with a guess; I say whether mine is larger or "
            "smaller.\n"
        )
        return (rules if self.rules else "") + f"It is from 1 to {self.most}.", self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        numbers = re.findall(r"(?<![0-9.])-?[0-9]+(?!\.?[0-9])", action)
        guess = int(numbers[-1]) if numbers and len(numbers[-1]) < 20 else 0
        if not 1 <= guess <= self.most:
            self._invalid += 1
            return f"Guess a number from 1 to {self.most}.", 0.0, False, False, self._info()
        self._won = guess == self._number
        if guess < self._number:
            said, self._low = "Larger.", max(self._low, guess + 1)
        elif guess > self._number:
            said, self._high = "Smaller.", min(self._high, guess - 1)
        else:
            said, self._low, self._high = "Right.", guess, guess
        return said, float(self._won), self._won, False, self._info()

    def close(self) -> None:
        """Do nothing: there are no resources."""

    def _info(self) -> dict[str, Any]:
        """Return the `info` of `reset` and `step`; `state` is the range that is still possible."""
        return {
            "success": self._won,
            "invalid": self._invalid,
            "state": f"{self._low} to {self._high}",
        }
