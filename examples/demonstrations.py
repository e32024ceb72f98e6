"""Demonstrations of the tiny agents of the examples: episodes of players that know what to do, and
are often distracted."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from roll.envs.built_in.boards.directions import MOVES
from roll.envs.built_in.boards.frozen_lake import HOLE, FrozenLake
from roll.envs.built_in.boards.sokoban import (
    BOX,
    BOX_ON_GOAL,
    GOAL,
    PLAYER,
    PLAYER_ON_GOAL,
    WALL,
    Sokoban,
)
from roll.envs.built_in.boards.tic_tac_toe import TicTacToe
from roll.envs.tools.formats.hermes import Hermes
from roll.envs.tools.running import run_calls

FIRST_SEED = 1_000_000
"""Seed of the first board of the demonstrations; those of training and validation have others."""
SKILL = 0.5
"""Share of the moves that lead to the goal; the others are random."""
Messages = list[dict[str, str]]
Field = tuple[int, int]
State = tuple[Field, Field]
"""Fields of the player and of the box."""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def walk_on_lake(seed: int, dice: random.Random) -> Messages:
    """Return a walk over the frozen lake."""
    lake = FrozenLake(size=4, holes=0.2, rules=False)
    shown, _ = lake.reset(seed=FIRST_SEED + seed)
    messages: Messages = []
    for _ in range(10):
        move = _way(shown) if dice.random() < SKILL else dice.choice(list(MOVES))
        messages += [user(shown), assistant(move)]
        shown, _, over, _, _ = lake.step(move)
        if over:
            break
    return messages


def _way(shown: str) -> str:
    """Return the first move of a shortest way from the walker to the goal."""
    fields = _fields(shown)
    goal = next(place for place, field in fields.items() if field == "G")
    firsts, waiting = {goal: ""}, deque([goal])
    while waiting:
        row, column = waiting.popleft()
        for move, (down, right) in MOVES.items():
            place = row - down, column - right
            if place in fields and place not in firsts and fields[place] != HOLE:
                firsts[place] = move
                waiting.append(place)
    return next(firsts[place] for place, field in fields.items() if field == "P")


def game_of_sokoban(seed: int, dice: random.Random) -> Messages:
    """Return a game of Sokoban with one box."""
    env = Sokoban(size=6, boxes=1, rules=False)
    shown, _ = env.reset(seed=FIRST_SEED + seed)
    fields = _fields(shown)
    floor = {place for place, field in fields.items() if field != WALL}
    (goal,) = (p for p, field in fields.items() if field in (GOAL, BOX_ON_GOAL, PLAYER_ON_GOAL))
    left = moves_left(floor, goal)
    messages: Messages = []
    for _ in range(14):
        fields = _fields(shown)
        (player,) = (p for p, field in fields.items() if field in (PLAYER, PLAYER_ON_GOAL))
        (box,) = (p for p, field in fields.items() if field in (BOX, BOX_ON_GOAL))
        after = {move: pushed((player, box), move, floor) for move in MOVES}
        best = min(MOVES, key=lambda move: left.get(after[move], 1000))
        move = best if dice.random() < SKILL else dice.choice(list(MOVES))
        messages += [user(shown), assistant(move)]
        shown, _, over, _, _ = env.step(move)
        if over or after[move] not in left:
            break
    return messages


def pushed(state: State, move: str, floor: set[Field]) -> State:
    """Return the state after a move in Sokoban with one box."""
    (row, column), box = state
    down, right = MOVES[move]
    ahead, behind = (row + down, column + right), (row + 2 * down, column + 2 * right)
    if ahead not in floor or (ahead == box and behind not in floor):
        return state
    return ahead, behind if ahead == box else box


def moves_left(floor: set[Field], goal: Field) -> dict[State, int]:
    """Return the least number of moves to the end from each state that can be won."""
    before: dict[State, list[State]] = {}
    states = [(player, box) for player in floor for box in floor if player != box]
    for state in states:
        for move in MOVES:
            before.setdefault(pushed(state, move, floor), []).append(state)
    left = {state: 0 for state in states if state[1] == goal}
    waiting = deque(left)
    while waiting:
        state = waiting.popleft()
        for earlier in before.get(state, ()):
            if earlier not in left:
                left[earlier] = left[state] + 1
                waiting.append(earlier)
    return left


def game_of_tic_tac_toe(seed: int, dice: random.Random) -> Messages:
    """Return a game of tic-tac-toe of a player that knows the rules alone, against another one."""
    env = TicTacToe(strength=0.0, rules=False)
    shown, _ = env.reset(seed=FIRST_SEED + seed)
    messages: Messages = []
    over = False
    while not over:
        move = dice.choice([sign for sign in shown if sign.isdigit()])
        messages += [user(shown), assistant(move)]
        shown, _, over, _, _ = env.step(move)
    return messages


def _fields(shown: str) -> dict[Field, str]:
    rows = shown.split("\n")
    return {(i, j): field for i, row in enumerate(rows) for j, field in enumerate(row)}


SYLLABLES = tuple(a + b for a in "bdfgklmnprstvz" for b in "aeiou")
NEEDED = (1, 2, 3, 5, 7)
"""Pieces of a call without which it is none."""
LOOKED_UP = {"town": ("search", "query"), "phone": ("phone", "name")}
"""What is asked about a person -> the tool that knows it, and its argument."""


@dataclass(frozen=True, slots=True)
class Errand:
    """Question that a tool answers, with the right call and its result."""

    question: str
    call: tuple[str, ...]
    """Pieces of the call."""
    result: str
    answer: str


def word(dice: random.Random) -> str:
    """Return a word of two syllables."""
    return dice.choice(SYLLABLES) + dice.choice(SYLLABLES)


def number(dice: random.Random) -> str:
    """Return a number of four digits."""
    return str(dice.randint(1000, 9999))


def calculation(dice: random.Random) -> Errand:
    """Ask for a product, which the tool `python` computes."""
    a, b = dice.randint(32, 99), dice.randint(32, 99)
    return Errand(f"{a}*{b}", _call("python", "code", f"print({a}*{b})"), str(a * b), str(a * b))


def question(about: str, name: str, answer: str) -> Errand:
    """Ask for the town of a person, which is in the corpus, or for the phone number, which the
    server knows."""
    tool, argument = LOOKED_UP[about]
    result = f"[1] {name}: {answer}" if about == "town" else answer
    return Errand(f"{about} of {name}", _call(tool, argument, name), result, answer)


def _call(tool: str, argument: str, value: str) -> tuple[str, ...]:
    head = ("<tool_call>", '{"name": "', tool, '", "arguments": {"', argument, '": "')
    return (*head, value, '"}}', "</tool_call>")


def errand_with_tools(seed: int, dice: random.Random) -> Messages:
    """Return what an agent does that often forgets a part of the call, does not call at all, or
    copies wrongly."""
    errand = (
        calculation(dice),
        question("town", word(dice), word(dice)),
        question("phone", word(dice), number(dice)),
    )[seed % 3]
    messages, luck = [user(errand.question)], dice.random()
    if luck < 0.15:
        return [*messages, assistant(_like(errand.answer, dice))]
    if luck < 0.55:
        forgotten = dice.choice(NEEDED)
        said = "".join(errand.call[:forgotten] + errand.call[forgotten + 1 :])
        messages += [assistant(said), _told(said)]
        if dice.random() < 0.5:
            return [*messages, assistant(_like(errand.answer, dice))]
    messages += [assistant("".join(errand.call)), _result(errand.result)]
    right = dice.random() < 0.8
    return [*messages, assistant(errand.answer if right else _like(errand.answer, dice))]


def _told(said: str) -> dict[str, str]:
    """Return the answer to a call that is none."""
    calls = Hermes().parse(said).calls
    (found,) = asyncio.run(run_calls(calls, {}, 1.0))
    return _result(found.text)


def _result(text: str) -> dict[str, str]:
    return {"role": "tool", "content": text}


def _like(answer: str, dice: random.Random) -> str:
    """Return a wrong answer of the same form."""
    return word(dice) if answer.isalpha() else number(dice)


def rows_about(people: Mapping[str, str], about: str) -> list[dict[str, str]]:
    """Return tasks with their answers."""
    return [
        {"question": question(about, name, known).question, "answer": known}
        for name, known in people.items()
    ]
