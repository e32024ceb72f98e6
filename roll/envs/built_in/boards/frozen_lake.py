"""`frozen_lake`: walk over a frozen lake to the goal, without falling into a hole.

The rules are those of gymnasium's FrozenLake; the observation is the map as text.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any, Literal

from roll.envs.built_in.boards.directions import MOVES, last_move, told_fields

AGENT, ICE, HOLE, GOAL = "P", "_", "O", "G"


class FrozenLake:
    """Frozen lake with a map that follows from the seed; each map has a way to the goal.

    A turn is one word: left, down, right or up. The last of these words counts. A turn without one
    is counted (`invalid`), and nothing moves. The reward is 1 at the goal, 0 elsewhere.

    Args:
        size: number of rows and columns.
        holes: share of the fields that are holes.
        slippery: as in gymnasium, a move goes in the wanted direction, or in one of the two at a
            right angle to it, with equal chance.
        show: `symbols`: a map; `text`: sentences with the row and column of each thing.
        rules: explain the game in the first observation.
    """

    def __init__(
        self,
        size: int = 4,
        holes: float = 0.2,
        slippery: bool = False,
        show: Literal["symbols", "text"] = "symbols",
        rules: bool = True,
    ) -> None:
        """Take the arguments, which the class describes; ValueError for one that is out of its
        range."""
        if size < 2 or not 0 <= holes < 0.8:
            raise ValueError(
                f"size = {size} must be at least 2, holes = {holes:g} at least 0 and below 0.8"
            )
        if show not in ("symbols", "text"):
            raise ValueError(f"show = {show!r} must be 'symbols' or 'text'")
        self.size = size
        self.holes = holes
        self.slippery = slippery
        self.show = show
        self.rules = rules
        self._invalid = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._dice = random.Random(seed)
        self._fields, self._at = self._make(), (0, 0)
        task = f"Walk from {AGENT} to {GOAL} over the ice ({ICE}), and not into a hole ({HOLE})."
        if self.show == "text":
            task = "Walk over the ice to the goal, and not into a hole. Rows count downwards."
        rules = f"{task} Answer with one move: {', '.join(MOVES)}.\n"
        return (rules if self.rules else "") + self._shown(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        move = last_move(action)
        if move is None:
            self._invalid += 1
        else:
            self._at = self._moved(move)
        row, column = self._at
        field = self._fields[row][column]
        won = field == GOAL
        return self._shown(), float(won), won or field == HOLE, False, self._info()

    def close(self) -> None:
        """Do nothing: there are no resources."""

    def _info(self) -> dict[str, Any]:
        """Return the `info` of `reset` and `step`; `state` is the row and column of the player,
        from 0."""
        row, column = self._at
        return {
            "success": self._fields[row][column] == GOAL,
            "invalid": self._invalid,
            "state": f"{row},{column}",
        }

    def _make(self) -> list[str]:
        """Return a random map, row by row, with a way from the first field to the last one."""
        while True:
            fields = [
                "".join(HOLE if self._dice.random() < self.holes else ICE for _ in range(self.size))
                for _ in range(self.size)
            ]
            fields[0] = ICE + fields[0][1:]
            fields[-1] = fields[-1][:-1] + GOAL
            if self._solvable(fields):
                return fields

    def _solvable(self, fields: list[str]) -> bool:
        """Return whether a way without holes leads from the first field to the goal."""
        seen, waiting = {(0, 0)}, deque([(0, 0)])
        while waiting:
            row, column = waiting.popleft()
            if fields[row][column] == GOAL:
                return True
            for down, right in MOVES.values():
                place = row + down, column + right
                inside = all(0 <= each < self.size for each in place)
                if inside and place not in seen and fields[place[0]][place[1]] != HOLE:
                    seen.add(place)
                    waiting.append(place)
        return False

    def _moved(self, move: str) -> tuple[int, int]:
        """Return the field after a move; the edge of the lake stops it."""
        names = list(MOVES)
        if self.slippery:
            move = names[(names.index(move) + self._dice.choice((-1, 0, 1))) % len(names)]
        (row, column), (down, right) = self._at, MOVES[move]
        last = self.size - 1
        return min(max(row + down, 0), last), min(max(column + right, 0), last)

    def _shown(self) -> str:
        """Return the lake as the policy sees it: a map of symbols, or fields in words."""
        if self.show == "text":
            return self._told()
        rows = [list(row) for row in self._fields]
        row, column = self._at
        rows[row][column] = AGENT
        return "\n".join("".join(row) for row in rows)

    def _told(self) -> str:
        """Return the map as text; rows and columns count from 1."""
        fields = range(self.size)
        holes = [(i + 1, j + 1) for i in fields for j in fields if self._fields[i][j] == HOLE]
        row, column = self._at
        return (
            f"The lake has {self.size} rows and {self.size} columns.\n"
            f"You: {told_fields([(row + 1, column + 1)])}\n"
            f"Goal: {told_fields([(self.size, self.size)])}\nHoles: {told_fields(holes)}"
        )
