"""Tic-tac-toe and connect four, with the rules and the values of positions told once more."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any

import pytest

from roll.envs.built_in.boards.connect_four import ConnectFour
from roll.envs.built_in.boards.lines import Lines
from roll.envs.built_in.boards.tic_tac_toe import TicTacToe
from roll.envs.contract import check_env

Board = tuple[str, ...]
"""Rows from the top; `X`, `O` and `_`."""


def has_line(board: Board, sign: str, length: int) -> bool:
    rows, columns = len(board), len(board[0])
    for i in range(rows):
        for j in range(columns):
            for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                places = [(i + n * down, j + n * right) for n in range(length)]
                if all(
                    0 <= k < rows and 0 <= m < columns and board[k][m] == sign for k, m in places
                ):
                    return True
    return False


def children(board: Board, sign: str, drops: bool) -> dict[int, Board]:
    """The boards after each allowed move."""
    found = {}
    width = len(board[0])
    for move in range(width if drops else width * len(board)):
        if drops:
            free = [i for i, row in enumerate(board) if row[move] == "_"]
            place = (free[-1], move) if free else None
        else:
            i, j = divmod(move, width)
            place = (i, j) if board[i][j] == "_" else None
        if place is not None:
            rows = [list(row) for row in board]
            rows[place[0]][place[1]] = sign
            found[move] = tuple("".join(row) for row in rows)
    return found


@cache
def outcome(board: Board, sign: str, length: int, drops: bool) -> int:
    """1, 0 or -1 for the player who is to move, by plain search of all games."""
    other = "O" if sign == "X" else "X"
    if has_line(board, other, length):
        return -1
    after = children(board, sign, drops)
    if not after:
        return 0
    return max(-outcome(each, other, length, drops) for each in after.values())


def bits(board: Board, sign: str) -> int:
    flat = "".join(board)
    return sum(1 << i for i, each in enumerate(flat) if each == sign)


@pytest.mark.parametrize(
    ("rows", "columns", "length", "drops"),
    [(3, 3, 3, False), (3, 4, 3, True), (4, 3, 3, True), (2, 5, 2, True)],
)
def test_best_moves_are_those_of_a_search_of_all_games(
    rows: int, columns: int, length: int, drops: bool
) -> None:
    game, dice = Lines(rows, columns, length, drops), random.Random(0)
    for _ in range(40):
        board, sign = ("_" * columns,) * rows, "X"
        while True:
            after = children(board, sign, drops)
            other = "O" if sign == "X" else "X"
            if not after or has_line(board, other, length):
                break
            values = {m: -outcome(each, other, length, drops) for m, each in after.items()}
            best = game.best_moves(bits(board, sign), bits(board, other), rows * columns)
            assert set(best) <= {m for m, value in values.items() if value == max(values.values())}
            wins_now = {m for m, each in after.items() if has_line(each, sign, length)}
            assert not wins_now or set(best) == wins_now, "it wins as soon as it can"
            board, sign = after[dice.choice(list(after))], other


def read(shown: str, game: Any) -> Board:
    rows = [line.split(" ") for line in shown.split("\n")]
    if isinstance(game, ConnectFour):
        return tuple("".join(row) for row in rows[1:])
    return tuple("".join(sign if sign in "XO" else "_" for sign in row) for row in rows)


@pytest.mark.parametrize(
    ("game", "length", "drops"),
    [
        (TicTacToe(strength=0.0, rules=False), 3, False),
        (TicTacToe(strength=0.5, first="opponent", rules=False), 3, False),
        (ConnectFour(strength=0.5, depth=2, rules=False), 4, True),
        (ConnectFour(rows=3, columns=4, length=3, depth=12, rules=False), 3, True),
    ],
)
def test_games_are_played_by_the_rules(game: Any, length: int, drops: bool) -> None:
    ends = set()
    for seed in range(25):
        dice = random.Random(seed)
        board = read(game.reset(seed=seed)[0], game)
        for _ in range(50):
            mine = children(board, "X", drops)
            move = dice.choice(sorted(mine))
            shown, reward, over, cut, info = game.step(f"I take {move + 1}")
            won = has_line(mine[move], "X", length)
            board = read(shown, game)
            if won or not children(mine[move], "O", drops):
                assert board == mine[move]
            else:
                assert board in children(mine[move], "O", drops).values()
            lost = has_line(board, "O", length)
            drawn = not (won or lost) and not children(board, "X", drops)
            assert (over, cut) == (won or lost or drawn, False)
            assert reward == won - lost
            assert [info[key] for key in ("success", "lost", "drawn")] == [won, lost, drawn]
            assert info["state"] == "".join(board)
            if over:
                ends.add(reward)
                break
        else:
            raise AssertionError("the game has no end")
    assert len(ends) >= 2


def test_a_perfect_opponent_never_loses_and_a_random_one_does() -> None:
    results: dict[float, list[float]] = {1.0: [], 0.0: []}
    for strength, rewards in results.items():
        for seed in range(60):
            game, dice, over = TicTacToe(strength=strength), random.Random(seed), False
            game.reset(seed=seed)
            while not over:
                _, reward, over, _, _ = game.step(str(dice.randint(1, 9)))
                if game._match.invalid:
                    game._match.invalid = 0
            rewards.append(reward)
    assert max(results[1.0]) == 0
    assert results[0.0].count(1.0) > 20


def perfect(said: str) -> str:
    """The move of a player that searches all games, from the shown board."""
    board = tuple(
        "".join(sign if sign in "XO" else "_" for sign in row.split(" "))
        for row in said.split("\n")[-3:]
    )
    after = children(board, "X", False)
    return str(1 + max(after, key=lambda move: -outcome(after[move], "O", 3, False)))


def test_two_perfect_players_draw() -> None:
    game = TicTacToe(first="policy")
    for seed in range(5):
        said, _ = game.reset(seed=seed)
        over = False
        while not over:
            said, reward, over, _, info = game.step(perfect(said))
        assert (reward, info["drawn"]) == (0.0, True)


@pytest.mark.parametrize("game", [TicTacToe, ConnectFour])
def test_turns_without_an_allowed_move_lose_in_the_end(game: Any) -> None:
    env = game(first="policy")
    first, _ = env.reset(seed=0)
    for turn, action in enumerate(("pass", "0", "99"), 1):
        shown, reward, over, _, info = env.step(action)
        assert first.endswith("\n" + shown)
        assert info["invalid"] == turn
    assert (reward, over, info["lost"], info["success"]) == (-1.0, True, True, False)


def test_a_full_column_is_not_allowed() -> None:
    env = ConnectFour(rows=1, columns=4, length=4, first="policy")
    env.reset(seed=0)
    shown, *_ = env.step("1")
    assert re.fullmatch(r"1 2 3 4\nX .*O.*", shown)
    assert env.step("1")[4]["invalid"] == 1


@pytest.mark.parametrize(
    ("env", "kwargs"),
    [
        (TicTacToe, {"strength": 0.5}),
        (ConnectFour, {"depth": 2, "strength": 0.8}),
        (ConnectFour, {"rows": 4, "columns": 4, "length": 3, "depth": 16}),
    ],
)
def test_they_keep_the_contract(env: Any, kwargs: dict[str, Any]) -> None:
    moves = list("123456789")
    check_env(env, kwargs=kwargs, actions=moves, max_turns=25, reward_range=(-1, 1))


@pytest.mark.parametrize(
    ("env", "kwargs", "message"),
    [
        (TicTacToe, {"strength": 2}, "strength = 2 must be from 0 to 1"),
        (TicTacToe, {"first": "nobody"}, "one of policy, opponent, random"),
        (ConnectFour, {"length": 9}, "length = 9 must be at least 2 and fit"),
        (ConnectFour, {"depth": 0}, "depth = 0 must be at least 1"),
    ],
)
def test_games_that_cannot_be_are_refused(env: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        env(**kwargs)
