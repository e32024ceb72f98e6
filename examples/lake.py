"""Make the model and the tasks of the frozen lake example, in two minutes and without a network.

The model learns from a player that takes a shortest way to the goal, but hesitates; see
`demonstrations.py`. None of the maps of validation is among those of training or demonstrations.

    python examples/lake.py [--out outputs/lake] [--seed 0]
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from examples.demonstrations import Game, main
from roll.envs.built_in.boards.directions import MOVES
from roll.envs.built_in.boards.frozen_lake import AGENT, GOAL, HOLE, ICE, FrozenLake

SIZE = 4


def new_lake() -> FrozenLake:
    return FrozenLake(size=SIZE, rules=False)


@cache
def way(shown: str) -> str:
    """Return the first move of a shortest way from the player to the goal."""
    fields = {
        (i, j): field for i, row in enumerate(shown.split("\n")) for j, field in enumerate(row)
    }
    goal = next(place for place, field in fields.items() if field == GOAL)
    left, waiting = {goal: 0}, deque([goal])
    while waiting:
        row, column = waiting.popleft()
        for down, right in MOVES.values():
            place = row - down, column - right
            if place in fields and place not in left and fields[place] != HOLE:
                left[place] = left[row, column] + 1
                waiting.append(place)
    row, column = next(place for place, field in fields.items() if field == AGENT)
    ahead = {move: (row + down, column + right) for move, (down, right) in MOVES.items()}
    return min(MOVES, key=lambda move: left.get(ahead[move], len(fields)))


def rows() -> list[str]:
    """Return all rows of a map."""
    fields = itertools.product((AGENT, ICE, HOLE), repeat=SIZE)
    free = ["".join(row) for row in fields if row.count(AGENT) <= 1]
    last = [row[:-1] + GOAL for row in free if row[-1] == ICE]
    return [row + "\n" for row in free] + last + [row for row in free if row[-1] == AGENT]


LAKE = Game(
    name="lake",
    example="agentic_frozen_lake",
    new=new_lake,
    best=way,
    rows=rows(),
    row=rf"[{AGENT}{ICE}{HOLE}{GOAL}]{{{SIZE}}}\n?",
    seen="m.content",
    skill=0.45,
    slips=0.15,
    turns=8,
    episodes=20_000,
)

if __name__ == "__main__":
    main(LAKE, __doc__)
