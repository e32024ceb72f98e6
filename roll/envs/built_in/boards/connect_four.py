"""`connect_four`: four in a line, with pieces that fall, against a scripted opponent."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

from roll.envs.built_in.boards.lines import Lines
from roll.envs.built_in.boards.match import OPPONENT, POLICY, Match, check_opponent


class ConnectFour:
    """Connect four. A turn is the number of a column that is not full; the last number counts.

    The reward is 1 for a game that is won, 0 for a draw, -1 for a loss. Three turns without an
    allowed move lose the game.

    Args:
        rows: number of rows.
        columns: number of columns.
        length: number of pieces in a line that wins.
        strength: share of the opponent's moves that are the best it sees; the others are random.
        depth: number of moves that the opponent looks ahead. It plays perfectly from where the rest
            of the game is not longer; time grows with `columns` to the power of `depth`.
        first: who begins: `policy`, `opponent`, or `random` (by the seed).
        rules: explain the game in the first observation.
    """

    def __init__(
        self,
        rows: int = 6,
        columns: int = 7,
        length: int = 4,
        strength: float = 1.0,
        depth: int = 4,
        first: str = "random",
        rules: bool = True,
    ) -> None:
        """Take the arguments, which the class describes; ValueError for one that is out of its
        range."""
        check_opponent(strength, first)
        if not 2 <= length <= max(rows, columns) or min(rows, columns) < 1 or columns > 99:
            raise ValueError(
                f"length = {length} must be at least 2 and fit on the board, rows = {rows} and "
                f"columns = {columns} must be at least 1, columns at most 99"
            )
        if depth < 1:
            raise ValueError(f"depth = {depth} must be at least 1")
        self.strength = strength
        self.depth = depth
        self.first = first
        self.rules = rules
        self._lines = _game(rows, columns, length)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._match = Match(self._lines, self.strength, self.depth, random.Random(seed))
        self._match.begin(self.first)
        rules = rules_of(self._lines) if self.rules else ""
        return rules + self._shown(), self._match.info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._match.play(action)
        match = self._match
        return self._shown(), match.reward, match.over, False, match.info()

    def close(self) -> None:
        """Do nothing: there are no resources."""

    def _shown(self) -> str:
        return picture(self._match.sign, self._lines)


def rules_of(lines: Lines) -> str:
    """Return the rules of a game, for the policy."""
    return (
        f"You play {POLICY}, I play {OPPONENT}. A piece falls to the lowest free field of its "
        f"column. Whoever has {lines.length} in a line first wins. Answer with the number of a "
        "column.\n"
    )


@cache
def _game(rows: int, columns: int, length: int) -> Lines:
    """Return the rules of a board; one object for all episodes, which share what it has learnt."""
    return Lines(rows, columns, length, drops=True)


GAME = _game(6, 7, 4)
"""The usual board."""
RULES = rules_of(GAME)


def picture(sign: Callable[[int], str], lines: Lines = GAME) -> str:
    """Return the board as text; `sign` returns the piece on a field, empty if there is none."""
    columns = lines.columns
    signs = [sign(i) or "_" for i in range(lines.rows * columns)]
    head = " ".join(str(column % 10) for column in range(1, columns + 1))
    rows = [" ".join(signs[i : i + columns]) for i in range(0, len(signs), columns)]
    return "\n".join([head, *rows])
