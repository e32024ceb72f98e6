"""Levels of Sokoban, made by reverse play: boxes begin on the goals and are pulled away, so pushing
them the same way back solves the level."""

from __future__ import annotations

import random
from dataclasses import dataclass

from roll.envs.built_in.boards.directions import MOVES

Field = tuple[int, int]
"""Row and column."""
TRIES = 1000
"""Number of random levels that are tried before the settings count as impossible."""


@dataclass(frozen=True, slots=True)
class Level:
    """Begin of a game."""

    floor: frozenset[Field]
    goals: frozenset[Field]
    boxes: frozenset[Field]
    player: Field


def make_level(dice: random.Random, size: int, boxes: int, walls: float, pulls: int) -> Level:
    """Return a random level that can be solved, in which no box is on a goal.

    Args:
        dice: source of random numbers.
        size: number of rows and columns, with the walls around.
        boxes: number of boxes and of goals.
        walls: share of the inner fields that are walls.
        pulls: largest number of times that a box is pulled; as many pushes suffice for the level.

    Raises:
        ValueError: no such level was found.
    """
    for _ in range(TRIES):
        floor = _floor(dice, size, walls)
        if len(floor) < boxes + 2:
            continue
        *goals, player = dice.sample(sorted(floor), boxes + 1)
        level = _pulled(dice, floor, frozenset(goals), player, pulls)
        if level is not None:
            return level
    raise ValueError(
        f"no level of Sokoban was found with size = {size}, boxes = {boxes}, walls = {walls:g}, "
        f"pulls = {pulls}; allow a larger size, or fewer boxes or walls"
    )


def _floor(dice: random.Random, size: int, walls: float) -> frozenset[Field]:
    """Return the fields of one room inside the outer walls."""
    inner = [(row, column) for row in range(1, size - 1) for column in range(1, size - 1)]
    free = frozenset(field for field in inner if dice.random() >= walls)
    return reached(dice.choice(sorted(free)), free) if free else free


def reached(start: Field, free: frozenset[Field]) -> frozenset[Field]:
    """Return the fields to which one can walk over free fields."""
    seen, waiting = {start}, [start]
    while waiting:
        row, column = waiting.pop()
        for down, right in MOVES.values():
            field = row + down, column + right
            if field in free and field not in seen:
                seen.add(field)
                waiting.append(field)
    return frozenset(seen)


def _pulled(
    dice: random.Random, floor: frozenset[Field], goals: frozenset[Field], player: Field, pulls: int
) -> Level | None:
    """Pull boxes away from the goals, as far as it goes; None if a box ends on a goal."""
    boxes = set(goals)
    for _ in range(pulls):
        free = floor - boxes
        walked = reached(player, free)
        ways = []
        for row, column in sorted(boxes):
            for down, right in MOVES.values():
                beside, behind = (row + down, column + right), (row + 2 * down, column + 2 * right)
                if beside in walked and behind in free:
                    ways.append(((row, column), beside, behind))
        if not ways:
            break
        box, beside, behind = dice.choice(ways)
        boxes.remove(box)
        boxes.add(beside)
        player = behind
    if boxes & goals:
        return None
    player = dice.choice(sorted(reached(player, floor - boxes)))
    return Level(floor, goals, frozenset(boxes), player)
