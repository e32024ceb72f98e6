"""`sokoban`: push all boxes onto the goals.

The rewards are those of gym_sokoban; the symbols are the usual ones of Sokoban levels (XSB).
"""

from __future__ import annotations

import random
from typing import Any, Literal

from roll.envs.built_in.boards.directions import MOVES, last_move, told_fields
from roll.envs.built_in.boards.sokoban_level import Field, make_level

WALL, FLOOR, GOAL, BOX, BOX_ON_GOAL, PLAYER, PLAYER_ON_GOAL = "#", "_", ".", "$", "*", "@", "+"


class Sokoban:
    """Sokoban with a level that follows from the seed; each level can be solved.

    A turn is one word: left, down, right or up. The last of these words counts. The player pushes
    the box that is in the way, if the field behind it is free. The reward of a turn is
    -`step_penalty`, plus 1 for a box pushed onto a goal, minus 1 for one pushed off, plus
    `end_reward` when all boxes are on goals.

    Args:
        size: number of rows and columns, with the walls around.
        boxes: number of boxes.
        walls: share of the inner fields that are walls.
        pulls: number of pushes that suffice to solve a level.
        show: `symbols`: a map; `text`: sentences with the row and column of each thing.
        step_penalty: see above.
        end_reward: see above.
        rules: explain the game in the first observation.
    """

    def __init__(
        self,
        size: int = 6,
        boxes: int = 1,
        walls: float = 0.1,
        pulls: int = 4,
        show: Literal["symbols", "text"] = "symbols",
        step_penalty: float = 0.1,
        end_reward: float = 10.0,
        rules: bool = True,
    ) -> None:
        """Take the arguments, which the class describes; ValueError for one that is out of its
        range."""
        if size < 5 or boxes < 1 or pulls < 1 or not 0 <= walls < 0.8:
            raise ValueError(
                f"size = {size} must be at least 5, boxes = {boxes} and pulls = {pulls} at least "
                f"1, walls = {walls:g} at least 0 and below 0.8"
            )
        if show not in ("symbols", "text"):
            raise ValueError(f"show = {show!r} must be 'symbols' or 'text'")
        self.size = size
        self.boxes = boxes
        self.walls = walls
        self.pulls = pulls
        self.show = show
        self.step_penalty = step_penalty
        self.end_reward = end_reward
        self.rules = rules
        self._invalid = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        level = make_level(random.Random(seed), self.size, self.boxes, self.walls, self.pulls)
        self._floor, self._goals = level.floor, level.goals
        self._boxes, self._player = set(level.boxes), level.player
        return (self._rules() if self.rules else "") + self._shown(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        before = len(self._boxes & self._goals)
        move = last_move(action)
        if move is None:
            self._invalid += 1
        else:
            self._move(*MOVES[move])
        change = len(self._boxes & self._goals) - before
        won = self._boxes == self._goals
        reward = change - self.step_penalty + won * self.end_reward
        return self._shown(), reward, won, False, self._info()

    def close(self) -> None:
        """Do nothing: there are no resources."""

    def _move(self, down: int, right: int) -> None:
        """Move the player, and the box in the way; walls, and boxes that cannot move, stop it."""
        row, column = self._player
        ahead, behind = (row + down, column + right), (row + 2 * down, column + 2 * right)
        if ahead in self._boxes and behind in self._floor and behind not in self._boxes:
            self._boxes.remove(ahead)
            self._boxes.add(behind)
        if ahead in self._floor and ahead not in self._boxes:
            self._player = ahead

    def _info(self) -> dict[str, Any]:
        """Return the `info` of `reset` and `step`; `state` is the fields of the player and of all
        boxes."""
        boxes = " ".join(f"{row},{column}" for row, column in sorted(self._boxes))
        return {
            "success": self._boxes == self._goals,
            "boxes_on_goals": len(self._boxes & self._goals),
            "invalid": self._invalid,
            "state": f"{self._player[0]},{self._player[1]} {boxes}",
        }

    def _rules(self) -> str:
        """Return the rules, which go before the first observation."""
        signs = (
            f" You: {PLAYER}, wall: {WALL}, floor: {FLOOR}, goal: {GOAL}, box: {BOX}, box on a "
            f"goal: {BOX_ON_GOAL}, you on a goal: {PLAYER_ON_GOAL}."
        )
        signs = signs if self.show == "symbols" else ""
        return (
            f"Push every box onto a goal.{signs} You push a box by walking against it, if the "
            "field behind it is free; you cannot pull. Answer with one move: "
            f"{', '.join(MOVES)}.\n"
        )

    def _shown(self) -> str:
        """Return the room as the policy sees it: a map of symbols, or lists of fields in words."""
        if self.show == "symbols":
            fields = range(self.size)
            return "\n".join("".join(self._symbol((i, j)) for j in fields) for i in fields)
        inner = [(i, j) for i in range(1, self.size - 1) for j in range(1, self.size - 1)]
        walls = [field for field in inner if field not in self._floor]
        return (
            f"The room has rows 1 to {self.size - 2} and columns 1 to {self.size - 2}.\n"
            f"You: {told_fields([self._player])}\nBoxes: {told_fields(self._boxes)}\n"
            f"Goals: {told_fields(self._goals)}\nWalls: {told_fields(walls)}"
        )

    def _symbol(self, field: Field) -> str:
        """Return the symbol of a field, with what stands on it."""
        if field not in self._floor:
            return WALL
        on_goal = field in self._goals
        if field == self._player:
            return PLAYER_ON_GOAL if on_goal else PLAYER
        if field in self._boxes:
            return BOX_ON_GOAL if on_goal else BOX
        return GOAL if on_goal else FLOOR
