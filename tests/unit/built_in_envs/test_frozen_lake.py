"""The frozen lake keeps the rules of gymnasium's, which are told here once more."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.envs.built_in.boards.directions import last_move
from roll.envs.built_in.boards.frozen_lake import FrozenLake

STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def rows(shown: str) -> list[str]:
    return shown.split("\n")


def place(shown: str) -> tuple[int, int]:
    (found,) = [
        (i, j) for i, row in enumerate(rows(shown)) for j, field in enumerate(row) if field == "P"
    ]
    return found


@given(
    st.integers(0, 2**31), st.integers(2, 8), st.lists(st.sampled_from(list(STEPS)), max_size=30)
)
def test_a_walk_is_as_the_map_says(seed: int, size: int, moves: list[str]) -> None:
    lake = FrozenLake(size=size, rules=False)
    shown, _ = lake.reset(seed=seed)
    fields = [list(row) for row in rows(shown)]
    assert place(shown) == (0, 0)
    assert fields[-1][-1] == "G"
    assert len(fields) == size == len(fields[0])
    row, column = 0, 0
    for move in moves:
        down, right = STEPS[move]
        row = min(max(row + down, 0), size - 1)
        column = min(max(column + right, 0), size - 1)
        shown, reward, over, cut, info = lake.step(f"I go {move.upper()}.")
        assert place(shown) == (row, column)
        field = fields[row][column]
        assert (reward, over) == (float(field == "G"), field in "GO")
        assert not cut
        assert info["success"] == (field == "G")
        assert info["state"] == f"{row},{column}"
        if over:
            break


@pytest.mark.parametrize("size", [3, 4, 8])
def test_every_map_has_a_way_to_the_goal_and_a_seed_is_one_map(size: int) -> None:
    maps = Counter[str]()
    for seed in range(200):
        lake = FrozenLake(size=size, holes=0.3, rules=False)
        shown, _ = lake.reset(seed=seed)
        assert FrozenLake(size=size, holes=0.3, rules=False).reset(seed=seed)[0] == shown
        reached, fields = {(0, 0)}, rows(shown)
        for _ in range(size * size):
            reached |= {
                (i + down, j + right)
                for i, j in reached
                for down, right in STEPS.values()
                if 0 <= i + down < size
                and 0 <= j + right < size
                and fields[i + down][j + right] != "O"
            }
        assert (size - 1, size - 1) in reached
        maps[shown] += 1
    assert len(maps) > (20 if size == 3 else 150)


def test_on_slippery_ice_a_third_of_the_moves_goes_each_of_three_ways() -> None:
    ways = Counter[tuple[int, int]]()
    for seed in range(600):
        lake = FrozenLake(size=8, holes=0.0, slippery=True, rules=False)
        lake.reset(seed=seed)
        lake._at = (4, 4)
        shown, *_ = lake.step("right")
        ways[place(shown)] += 1
    assert set(ways) == {(4, 5), (3, 4), (5, 4)}
    assert all(150 < count < 250 for count in ways.values())


@pytest.mark.parametrize(
    ("turn", "move"),
    [
        ("left, so that I end up in the group", "up"),
        ("right. Then I update my plan", "right"),
        ("LEFT!", "left"),
        ("no upper bound", None),
        ("1left2", "left"),
    ],
)
def test_a_part_of_a_word_is_no_move(turn: str, move: str | None) -> None:
    assert last_move(turn) == move


def test_a_turn_without_a_move_moves_nothing_and_counts() -> None:
    lake = FrozenLake(size=3, holes=0.0)
    first, _ = lake.reset(seed=1)
    assert first.startswith("Walk from P to G")
    shown, reward, over, _, info = lake.step("I had rather not.")
    assert (place(shown), reward, over, info["invalid"]) == ((0, 0), 0.0, False, 1)
    assert place(lake.step("left, no: down")[0]) == (1, 0), "the last word counts"


def test_as_text_it_names_the_same_fields() -> None:
    lake, told = FrozenLake(holes=0.4, rules=False), FrozenLake(holes=0.4, show="text")
    shown, _ = lake.reset(seed=4)
    said, _ = told.reset(seed=4)
    holes = [(i, j) for i, row in enumerate(rows(shown)) for j, f in enumerate(row) if f == "O"]
    assert holes
    listed = "; ".join(f"row {i + 1} column {j + 1}" for i, j in holes)
    assert said.endswith(f"You: row 1 column 1\nGoal: row 4 column 4\nHoles: {listed}")
    assert said.startswith("Walk over the ice to the goal")
    for move in STEPS:
        i, j = place(lake.step(move)[0])
        assert f"You: row {i + 1} column {j + 1}\n" in told.step(move)[0]
    with pytest.raises(ValueError, match="show = 'picture' must be"):
        FrozenLake(show="picture")  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"size": 1}, {"holes": 0.9}])
def test_a_lake_that_cannot_be_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be at least 2, holes = "):
        FrozenLake(**options)  # type: ignore[arg-type]
