"""`sliding_puzzle`: bring the tiles of a square into order by moving the gap."""

from __future__ import annotations

import random
from typing import Any

from roll.envs.built_in.boards.directions import MOVES, last_move

GAP = 0


class SlidingPuzzle:
    """Sliding puzzle; each one can be solved, because it is shuffled by moves of the gap.

    A turn is one word: left, down, right or up, the way that the gap goes. The last of these words
    counts; the edge stops the gap. The reward is 1 when the tiles are in order, with the gap at the
    end, and 0 before.

    Args:
        size: number of rows and columns.
        shuffles: number of moves that suffice to solve a puzzle.
        rules: explain the game in the first observation.
    """

    def __init__(self, size: int = 3, shuffles: int = 6, rules: bool = True) -> None:
        """Take the arguments, which the class describes; ValueError for one that is out of its
        range."""
        if size < 2 or shuffles < 1:
            raise ValueError(f"size = {size} must be at least 2, shuffles = {shuffles} at least 1")
        self.size = size
        self.shuffles = shuffles
        self.rules = rules
        self._goal = [*range(1, size * size), GAP]
        self._invalid = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        dice = random.Random(seed)
        self._tiles = self._goal[:]
        moves, last = 0, (0, 0)
        while moves < self.shuffles or self._tiles == self._goal:
            down, right = last = dice.choice(self._useful(last))
            self._move(down, right)
            moves += 1
        rules = (
            f"Bring the tiles into the order 1 to {self.size**2 - 1}, row by row, with the gap (_) "
            f"at the end. Answer with the way the gap moves: {', '.join(MOVES)}.\n"
        )
        return (rules if self.rules else "") + self._shown(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        move = last_move(action)
        if move is None:
            self._invalid += 1
        else:
            self._move(*MOVES[move])
        won = self._tiles == self._goal
        return self._shown(), float(won), won, False, self._info()

    def close(self) -> None:
        """Do nothing: there are no resources."""

    def _useful(self, last: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the moves that the edge allows and that do not undo the last one."""
        row, column = divmod(self._tiles.index(GAP), self.size)
        return [
            (down, right)
            for down, right in MOVES.values()
            if 0 <= row + down < self.size and 0 <= column + right < self.size
            if (down, right) != (-last[0], -last[1])
        ]

    def _move(self, down: int, right: int) -> None:
        """Exchange the gap with its neighbour; do nothing at the edge."""
        gap = self._tiles.index(GAP)
        row, column = gap // self.size + down, gap % self.size + right
        if 0 <= row < self.size and 0 <= column < self.size:
            tile = row * self.size + column
            self._tiles[gap], self._tiles[tile] = self._tiles[tile], GAP

    def _info(self) -> dict[str, Any]:
        """Return the `info` of `reset` and `step`; `state` is the tiles row by row, 0 for the
        gap."""
        right = sum(
            tile == goal for tile, goal in zip(self._tiles, self._goal, strict=True) if tile
        )
        return {
            "success": self._tiles == self._goal,
            "tiles_in_place": right,
            "invalid": self._invalid,
            "state": " ".join(map(str, self._tiles)),
        }

    def _shown(self) -> str:
        """Return the tiles row by row, `_` for the gap."""
        width = len(str(self.size**2 - 1))
        shown = [
            "_".rjust(width) if tile == GAP else str(tile).rjust(width) for tile in self._tiles
        ]
        rows = range(0, len(shown), self.size)
        return "\n".join(" ".join(shown[row : row + self.size]) for row in rows)
