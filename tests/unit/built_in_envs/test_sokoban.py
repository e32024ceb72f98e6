"""Sokoban keeps the rules of gym_sokoban, which are told here once more."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.envs.built_in.boards.sokoban import Sokoban
from roll.envs.contract import check_env

STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
Place = tuple[int, int]
State = tuple[Place, frozenset[Place]]


def read(shown: str) -> tuple[set[Place], frozenset[Place], State]:
    """Walls, goals, and player with boxes, of a map."""
    found: dict[str, set[Place]] = {}
    for i, row in enumerate(shown.split("\n")):
        for j, sign in enumerate(row):
            found.setdefault(sign, set()).add((i, j))

    def of(signs: str) -> set[Place]:
        return set().union(*(found.get(sign, set()) for sign in signs))

    (player,) = of("@+")
    return of("#"), frozenset(of(".*+")), (player, frozenset(of("$*")))


def after(walls: set[Place], state: State, move: str) -> State:
    (i, j), boxes = state
    (down, right) = STEPS[move]
    one, two = (i + down, j + right), (i + 2 * down, j + 2 * right)
    if one in walls or (one in boxes and (two in walls or two in boxes)):
        return state
    return one, (boxes - {one}) | {two} if one in boxes else boxes


def solution(shown: str) -> list[str]:
    """A shortest solution of a map, by breadth-first search."""
    walls, goals, first = read(shown)
    came: dict[State, tuple[State, str] | None] = {first: None}
    waiting = deque([first])
    while waiting:
        state = waiting.popleft()
        if state[1] == goals:
            moves: list[str] = []
            while (back := came[state]) is not None:
                state, move = back
                moves.append(move)
            return moves[::-1]
        for move in STEPS:
            reached = after(walls, state, move)
            if reached not in came:
                came[reached] = state, move
                waiting.append(reached)
    raise AssertionError(f"cannot be solved:\n{shown}")


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(5, 8),
    st.integers(1, 2),
    st.lists(st.sampled_from(list(STEPS)), max_size=40),
)
def test_a_game_is_as_the_rules_say(seed: int, size: int, boxes: int, moves: list[str]) -> None:
    game = Sokoban(size=size, boxes=boxes, rules=False)
    shown, _ = game.reset(seed=seed)
    walls, goals, state = read(shown)
    assert len(goals) == boxes == len(state[1])
    assert not goals & state[1]
    for move in moves:
        before = len(goals & state[1])
        state = after(walls, state, move)
        change, won = len(goals & state[1]) - before, state[1] == goals
        shown, reward, over, cut, info = game.step(f"Now {move.upper()}!")
        assert read(shown) == (walls, goals, state)
        assert reward == pytest.approx(-0.1 + change + 10 * won)
        assert (over, cut, info["success"]) == (won, False, won)
        if won:
            break


@pytest.mark.parametrize(("size", "boxes", "pulls"), [(5, 1, 2), (6, 1, 4), (6, 2, 6), (7, 2, 8)])
def test_every_level_can_be_solved(size: int, boxes: int, pulls: int) -> None:
    levels = set()
    for seed in range(40):
        shown, _ = Sokoban(size=size, boxes=boxes, pulls=pulls, rules=False).reset(seed=seed)
        walls, _, state = read(shown)
        pushes = 0
        for move in solution(shown):
            reached = after(walls, state, move)
            pushes += reached[1] != state[1]
            state = reached
        assert pushes >= 1
        levels.add(shown)
    assert len(levels) >= 36


def solver() -> Callable[[str], str]:
    plan: list[str] = []

    def act(said: str) -> str:
        if not plan:
            plan.extend(solution(said))
        return plan.pop(0)

    return act


def test_it_keeps_the_contract() -> None:
    kwargs: dict[str, Any] = {"rules": False}
    check_env(
        Sokoban,
        kwargs=kwargs,
        solver=solver,
        max_turns=30,
        actions=list(STEPS),
        reward_range=(-5, 10.9),
    )


def test_as_text_it_names_the_same_fields() -> None:
    game, told = Sokoban(size=6, boxes=2), Sokoban(size=6, boxes=2, show="text")
    shown, _ = game.reset(seed=5)
    said, info = told.reset(seed=5)
    assert "@" not in said
    assert "Answer with one move: left, down, right, up." in said
    walls, goals, (player, boxes) = read(shown[shown.index("\n") + 1 :])

    def fields(name: str) -> set[Place]:
        (line,) = re.findall(rf"^{name}: (.*)$", said, re.MULTILINE)
        return {(int(i), int(j)) for i, j in re.findall(r"row (\d) column (\d)", line)}

    assert fields("You") == {player}
    assert fields("Boxes") == boxes
    assert fields("Goals") == goals
    inner = {(i, j) for i in range(1, 5) for j in range(1, 5)}
    assert fields("Walls") == walls & inner
    assert info["state"].startswith(f"{player[0]},{player[1]} ")


def test_a_turn_without_a_move_costs_a_step() -> None:
    game = Sokoban(rules=False)
    first, _ = game.reset(seed=3)
    shown, reward, over, _, info = game.step("I wait.")
    assert (shown, reward, over, info["invalid"]) == (first, -0.1, False, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 4}, "must be at least 5"),
        ({"walls": 0.9}, "below 0.8"),
        ({"show": "picture"}, "must be 'symbols' or 'text'"),
    ],
)
def test_settings_that_make_no_game_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sokoban(**options)


def test_a_level_that_cannot_be_is_not_waited_for() -> None:
    with pytest.raises(ValueError, match="allow a larger size, or fewer boxes"):
        Sokoban(size=5, boxes=9).reset(seed=1)
