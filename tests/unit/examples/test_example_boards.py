"""What the examples on boards show their models, and on which boards they are judged."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from examples.demonstrations import (
    WAIT,
    Game,
    demonstration,
    demonstrations,
    first_boards,
    make_model,
    tasks,
)
from examples.lake import LAKE
from examples.sokoban import SOKOBAN
from roll.config.agentic import AgenticConfig
from roll.config.loading.compose import load_config
from roll.envs.built_in.boards.directions import MOVES
from roll.envs.loading import load_env
from tests.runs import ROOT

GAMES = [LAKE, SOKOBAN]


def config_of(game: Game) -> AgenticConfig:
    config = load_config(ROOT / f"examples/{game.example}/run.yaml").config
    assert isinstance(config, AgenticConfig)
    return config


def steps_on_lake(shown: str) -> int:
    """Number of moves of a shortest walk, by widening the set of fields that can be reached."""
    rows = shown.split("\n")
    fields = {(i, j): sign for i, row in enumerate(rows) for j, sign in enumerate(row)}
    reached = {place for place, sign in fields.items() if sign == "P"}
    for steps in itertools.count():
        if any(fields[place] == "G" for place in reached):
            return steps
        reached |= {
            (i + down, j + right)
            for i, j in reached
            for down, right in MOVES.values()
            if fields.get((i + down, j + right), "O") != "O"
        }
    raise AssertionError


def steps_in_sokoban(shown: str) -> int:
    """Number of moves that solve a level, by widening the set of levels that can be reached."""
    reached = {shown}
    for steps in itertools.count():
        if any("*" in level for level in reached):
            return steps
        reached |= {moved(level, *by) for level in reached for by in MOVES.values()}
    raise AssertionError


def moved(level: str, down: int, right: int) -> str:
    """Level after a move of the player, as text."""
    signs, by = [*level], down * (level.index("\n") + 1) + right
    here = next(i for i, sign in enumerate(signs) if sign in "@+")
    ahead, behind = here + by, here + 2 * by
    if signs[ahead] == "#":
        return level
    if signs[ahead] in "$*":
        if signs[behind] == "#":
            return level
        signs[behind] = {"_": "$", ".": "*"}[signs[behind]]
        signs[ahead] = {"$": "_", "*": "."}[signs[ahead]]
    signs[ahead] = {"_": "@", ".": "+"}[signs[ahead]]
    signs[here] = {"@": "_", "+": "."}[signs[here]]
    return "".join(signs)


@pytest.mark.parametrize(("game", "steps"), [(LAKE, steps_on_lake), (SOKOBAN, steps_in_sokoban)])
def test_the_best_moves_reach_the_end_in_the_fewest_turns(
    game: Game, steps: Callable[[str], int]
) -> None:
    for seed in range(60):
        board = game.new()
        shown, info = board.reset(seed=seed)
        expected, turns = steps(shown), 0
        while not info["success"]:
            move = game.best(shown)
            assert move is not None
            shown, _, _, _, info = board.step(move)
            turns += 1
        assert turns == expected


@pytest.mark.parametrize("game", GAMES, ids=lambda game: game.name)
def test_demonstrations_are_those_of_the_run_in_tokens_of_the_model(
    game: Game, tmp_path: Path
) -> None:
    make_model(tmp_path, game)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    config, dice = config_of(game), random.Random(0)
    (environment,) = config.environments.values()
    assert environment.max_turns <= game.turns
    for seed in range(40):
        messages = demonstration(game, seed, dice)
        env: Any = load_env("x", environment)()
        shown, _ = env.reset(seed=seed)
        for said, move in zip(messages[::2], messages[1::2], strict=True):
            assert said["content"] == shown
            shown, *_ = env.step(move["content"])
        tokens = tokenizer.apply_chat_template(messages)["input_ids"]
        assert len(tokens) <= config.data.max_episode_tokens
        assert tokenizer.unk_token_id not in tokens
        text = "".join(message["content"] for message in messages)
        read = tokenizer.decode(tokens, skip_special_tokens=True)
        # the walls above and below a level of sokoban are not shown
        assert re.sub("######\n?", "", read) == re.sub("######\n?", "", text)
        assert len(tokens) == len(messages) // 2 * (4 + len("bmwe")), "one token for each row"


@pytest.mark.parametrize("game", GAMES, ids=lambda game: game.name)
def test_the_player_waits_as_often_as_it_should(game: Game) -> None:
    dice = random.Random(1)
    moves = [
        message["content"]
        for seed in range(300)
        for message in demonstration(game, seed, dice)
        if message["role"] == "assistant"
    ]
    waiting = moves.count(WAIT) / len(moves)
    assert waiting == pytest.approx(1 - game.skill - game.slips, abs=0.05)


@pytest.mark.parametrize("game", GAMES, ids=lambda game: game.name)
def test_held_out_boards_are_seen_nowhere_else(game: Game) -> None:
    config = config_of(game)
    (held,) = config.validation.sets.values()
    assert held.seeds is not None
    seeds = range(held.first_seed, held.first_seed + held.seeds)
    held_out = set(first_boards(game, seeds).values())
    given = list(tasks(game))
    trained = first_boards(game, [task["seed"] for task in given])
    assert [task["prompt"] for task in given] == list(trained.values())
    assert not held_out & set(trained.values())
    assert len(trained) > config.data.prompts_per_step * config.max_steps
    shown = {m[0]["content"] for m in demonstrations(game, 500, random.Random(0))}
    assert not held_out & shown
