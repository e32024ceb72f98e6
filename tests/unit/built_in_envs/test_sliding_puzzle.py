"""The sliding puzzle against one told here once more, and a search that solves it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.envs.built_in.boards.sliding_puzzle import SlidingPuzzle
from roll.envs.contract import check_env

WAYS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
Rows = tuple[tuple[str, ...], ...]


def read(shown: str) -> Rows:
    return tuple(tuple(line.split()) for line in shown.split("\n"))


def moved(rows: Rows, way: str) -> Rows:
    board = [list(row) for row in rows]
    ((i, j),) = [(i, j) for i, r in enumerate(board) for j, tile in enumerate(r) if tile == "_"]
    down, right = WAYS[way]
    k, m = i + down, j + right
    if k in range(len(board)) and m in range(len(board)):
        board[i][j], board[k][m] = board[k][m], board[i][j]
    return tuple(tuple(row) for row in board)


def in_order(rows: Rows) -> bool:
    flat = [tile for row in rows for tile in row]
    return flat == [*map(str, range(1, len(flat))), "_"]


def solution(rows: Rows) -> list[str]:
    ways: dict[Rows, list[str]] = {rows: []}
    waiting = deque([rows])
    while waiting:
        here = waiting.popleft()
        if in_order(here):
            return ways[here]
        for way in WAYS:
            there = moved(here, way)
            if there not in ways:
                ways[there] = [*ways[here], way]
                waiting.append(there)
    raise AssertionError(f"cannot be solved: {rows}")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 4), st.lists(st.sampled_from(list(WAYS)), max_size=20))
def test_tiles_move_as_the_rules_say(seed: int, size: int, moves: list[str]) -> None:
    puzzle = SlidingPuzzle(size=size, rules=False)
    rows = read(puzzle.reset(seed=seed)[0])
    assert sorted(tile for row in rows for tile in row) == sorted(
        ["_", *map(str, range(1, size * size))]
    )
    assert not in_order(rows)
    for way in moves:
        rows = moved(rows, way)
        shown, reward, over, cut, info = puzzle.step(way)
        won = in_order(rows)
        assert (read(shown), reward, over, cut) == (rows, float(won), won, False)
        assert (info["success"], info["invalid"]) == (won, 0)
        assert info["state"] == " ".join(tile.replace("_", "0") for r in rows for tile in r)
        if won:
            break


def solver() -> Callable[[str], str]:
    plan: list[str] = []

    def act(said: str) -> str:
        if not plan:
            plan.extend(solution(read(said)))
        return plan.pop(0)

    return act


@pytest.mark.parametrize(("size", "shuffles"), [(2, 12), (2, 1), (3, 6), (3, 10)])
def test_it_keeps_the_contract_and_takes_no_more_moves_than_said(size: int, shuffles: int) -> None:
    trial = check_env(
        SlidingPuzzle,
        kwargs={"size": size, "shuffles": shuffles, "rules": False},
        solver=solver,
        seeds=range(6),
        actions=list(WAYS),
        reward_range=(0, 1),
    )
    assert all(len(one.turns) <= shuffles for one in trial.episodes["solver"])


def test_rules_are_told_once_and_other_turns_move_nothing() -> None:
    puzzle = SlidingPuzzle()
    first, _ = puzzle.reset(seed=1)
    assert "order 1 to 8" in first
    shown, reward, over, _, info = puzzle.step("tile 5")
    assert first.endswith("\n" + shown)
    assert (reward, over, info["invalid"]) == (0.0, False, 1)


def test_a_puzzle_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="size = 1 must be at least 2, shuffles = 0"):
        SlidingPuzzle(size=1, shuffles=0)
