"""`Match`: a game of lines between the policy and a scripted opponent."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Any

from roll.envs.built_in.boards.lines import Lines

POLICY, OPPONENT = "X", "O"
"""Signs of the pieces."""
FIRST = ("policy", "opponent", "random")
MAX_INVALID = 3
"""Number of turns without an allowed move that lose the game, so that it never pays to refuse to
move."""


@dataclass
class Match:
    """Course of one game."""

    lines: Lines
    strength: float
    depth: int
    dice: random.Random
    own: int = 0
    """Fields of the policy, as in `Lines`."""
    other: int = 0
    """Fields of the opponent."""
    reward: float = 0.0
    """Result for the policy: 1 won, 0 drawn or not over, -1 lost."""
    over: bool = False
    invalid: int = 0
    last: int | None = field(default=None)
    """Last move of the opponent."""

    def begin(self, first: str) -> None:
        """Let the opponent move if it begins; `first` is one of `FIRST`."""
        if first == "opponent" or (first == "random" and self.dice.random() < 0.5):
            self._reply()

    def play(self, action: str) -> None:
        """Make the move that an action names, and the opponent's answer.

        The last number in an action counts, from 1. A turn that names no allowed move changes
        nothing.
        """
        if self.over:
            return
        numbers = re.findall(r"[0-9]{1,4}", action)
        place = self.lines.landing(self.own | self.other, int(numbers[-1]) - 1) if numbers else None
        if place is None:
            self.invalid += 1
            if self.invalid >= MAX_INVALID:
                self.reward, self.over = -1.0, True
            return
        self.own |= 1 << place
        if self.lines.wins(self.own, place):
            self.reward, self.over = 1.0, True
        elif self.lines.full(self.own | self.other):
            self.over = True
        else:
            self._reply()

    def _reply(self) -> None:
        """Make a move of the opponent, and note the result if it ends the game."""
        move = self.lines.reply(
            self.other, self.own, strength=self.strength, depth=self.depth, dice=self.dice
        )
        place = self.lines.landing(self.own | self.other, move)
        assert place is not None
        self.other |= 1 << place
        self.last = move
        if self.lines.wins(self.other, place):
            self.reward, self.over = -1.0, True
        elif self.lines.full(self.own | self.other):
            self.over = True

    def sign(self, place: int) -> str:
        """Return the sign of the piece on a field; empty if there is none."""
        return POLICY if self.own >> place & 1 else OPPONENT if self.other >> place & 1 else ""

    def info(self) -> dict[str, Any]:
        """Return `info` of the environment; `state` is the sign of each field, row by row, `_` for
        a free one."""
        fields = range(self.lines.rows * self.lines.columns)
        return {
            "success": self.over and self.reward > 0,
            "drawn": self.over and self.reward == 0,
            "lost": self.over and self.reward < 0,
            "invalid": self.invalid,
            "state": "".join(self.sign(place) or "_" for place in fields),
        }


def check_opponent(strength: float, first: str) -> None:
    """Raise ValueError for settings that no opponent can have."""
    if not 0 <= strength <= 1 or first not in FIRST:
        raise ValueError(
            f"strength = {strength:g} must be from 0 to 1, first = {first!r} one of "
            f"{', '.join(FIRST)}"
        )
