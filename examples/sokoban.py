"""Make the model and the tasks of the sokoban example, in minutes and without a network.

The model learns from a player that takes a shortest way to the end of a level, but hesitates; see
`demonstrations.py`. None of the levels of validation is among those of training or demonstrations.

    python examples/sokoban.py [--out outputs/sokoban] [--seed 0]
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict, deque
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from examples.demonstrations import Game, main
from roll.envs.built_in.boards.directions import MOVES
from roll.envs.built_in.boards.sokoban import (
    BOX,
    BOX_ON_GOAL,
    FLOOR,
    GOAL,
    PLAYER,
    PLAYER_ON_GOAL,
    WALL,
    Sokoban,
)
from roll.envs.built_in.boards.sokoban_level import Field

SIZE = 6
INNER = SIZE - 2
"""Fields of a row inside the walls around."""
State = tuple[Field, Field]
"""Fields of the player and of the box."""


def new_level() -> Sokoban:
    return Sokoban(size=SIZE, rules=False)


@lru_cache(maxsize=64)
def moves_left(floor: frozenset[Field], goal: Field) -> dict[State, int]:
    """Return the number of moves that each state of a level with one box is away from its end;
    states from which it cannot be solved are missing."""
    before: dict[State, list[State]] = defaultdict(list)
    for state in itertools.permutations(floor, 2):
        for after in next_states(floor, state).values():
            before[after].append(state)
    left = {(player, goal): 0 for player in floor if player != goal}
    waiting = deque(left)
    while waiting:
        after = waiting.popleft()
        for state in before[after]:
            if state not in left:
                left[state] = left[after] + 1
                waiting.append(state)
    return left


def next_states(floor: frozenset[Field], state: State) -> dict[str, State]:
    """Return what each move that changes something leads to."""
    player, box = state
    found = {}
    for move, (down, right) in MOVES.items():
        ahead = player[0] + down, player[1] + right
        behind = ahead[0] + down, ahead[1] + right
        if ahead == box and behind in floor:
            found[move] = ahead, behind
        elif ahead in floor and ahead != box:
            found[move] = ahead, box
    return found


def way(shown: str) -> str | None:
    """Return the first move of a shortest way to the end; None if there is no way any more."""
    fields = {
        (i, j): field for i, row in enumerate(shown.split("\n")) for j, field in enumerate(row)
    }
    floor = frozenset(place for place, field in fields.items() if field != WALL)

    def place_of(*signs: str) -> Field:
        return next(place for place, field in fields.items() if field in signs)

    box = place_of(BOX, BOX_ON_GOAL)
    left = moves_left(floor, place_of(GOAL, BOX_ON_GOAL, PLAYER_ON_GOAL))
    state = place_of(PLAYER, PLAYER_ON_GOAL), box
    if state not in left:
        return None
    after = next_states(floor, state)
    return min(after, key=lambda move: left.get(after[move], len(left)))


def rows() -> list[str]:
    """Return all rows of a level, without those of the walls around: at most one player, one box
    and one goal."""
    found = []
    for row in itertools.product((WALL, FLOOR, GOAL, BOX, PLAYER, PLAYER_ON_GOAL), repeat=INNER):
        boxes, goals = row.count(BOX), row.count(GOAL) + row.count(PLAYER_ON_GOAL)
        if boxes <= 1 and goals <= 1 and row.count(PLAYER) + row.count(PLAYER_ON_GOAL) <= 1:
            found.append(f"{WALL}{''.join(row)}{WALL}\n")
    return found


SOKOBAN = Game(
    name="sokoban",
    example="agentic_sokoban",
    new=new_level,
    best=way,
    rows=rows(),
    row=rf"{WALL}[{WALL}{FLOOR}{GOAL}{BOX}{PLAYER}{PLAYER_ON_GOAL}]{{{INNER}}}{WALL}\n",
    # without the walls above and below
    seen=f"m.content[{SIZE + 1}:{(SIZE - 1) * (SIZE + 1)}]",
    skill=0.25,
    slips=0.15,
    turns=10,
    episodes=20_000,
)

if __name__ == "__main__":
    main(SOKOBAN, __doc__)
