"""`tic_tac_toe`: three in a row against a scripted opponent."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from roll.envs.built_in.boards.lines import Lines
from roll.envs.built_in.boards.match import OPPONENT, POLICY, Match, check_opponent

SIZE = 3
GAME = Lines(SIZE, SIZE, length=SIZE, drops=False)
RULES = (
    f"You play {POLICY}, I play {OPPONENT}. Whoever has three in a row first wins. Answer with the "
    "number of a free field.\n"
)


class TicTacToe:
    """Tic-tac-toe. A turn is the number of a free field, 1 to 9; the last number counts.

    The reward is 1 for a game that is won, 0 for a draw, -1 for a loss. Three turns without an
    allowed move lose the game.

    Args:
        strength: share of the opponent's moves that are perfect; the others are random. 0 is a
            random opponent, 1 one that never loses.
        first: who begins: `policy`, `opponent`, or `random` (by the seed).
        rules: explain the game in the first observation.
    """

    def __init__(self, strength: float = 1.0, first: str = "random", rules: bool = True) -> None:
        """Take the arguments, which the class describes; ValueError for one that is out of its
        range."""
        check_opponent(strength, first)
        self.strength = strength
        self.first = first
        self.rules = rules

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._match = Match(GAME, self.strength, SIZE * SIZE, random.Random(seed))
        self._match.begin(self.first)
        return (RULES if self.rules else "") + picture(self._match.sign), self._match.info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._match.play(action)
        match = self._match
        return picture(match.sign), match.reward, match.over, False, match.info()

    def close(self) -> None:
        """Do nothing: there are no resources."""


def picture(sign: Callable[[int], str]) -> str:
    """Return the board as text; `sign` returns the piece on a field, empty if there is none."""
    signs = [sign(place) or str(place + 1) for place in range(SIZE * SIZE)]
    return "\n".join(" ".join(signs[i : i + SIZE]) for i in range(0, SIZE * SIZE, SIZE))
