"""Models of agents on boards, made of demonstrations of a player that hesitates.

A model with random weights (Qwen3 architecture; one token per row of a board, and per move) learns
by SFT from a player that knows the best moves, but hesitates: in most of its turns it waits or
moves anywhere. So the model knows what to do, and seldom does it in time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from examples.tiny_model import (
    run_script,
    splitter,
    tokenizer_of,
    warm_start,
    write_jsonl,
    write_model,
)
from roll.envs.built_in.boards.directions import MOVES

WAIT = "wait"
"""Turn that is no move. The environments count it as invalid, and nothing moves."""
TRAIN, HELD_OUT = range(4096), range(100_000, 100_256)
"""Seeds of the boards of training and of validation."""
FIRST_SEED = 1_000_000
"""Seed of the first board of the demonstrations."""
ROLES = ["<board>", "<move>"]
Messages = list[dict[str, str]]


class Board(Protocol):
    """Environment with a board; see `roll.envs.built_in.boards`."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]: ...
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]: ...


@dataclass(frozen=True)
class Game:
    """Game of an example, and its player."""

    name: str
    """Name of the folder of outputs."""
    example: str
    """Name of the folder of the example."""
    new: Callable[[], Board]
    best: Callable[[str], str | None]
    """Function that returns the best move on a board; None if it cannot be won any more."""
    rows: Sequence[str]
    """All rows that the model may see, with the line break that ends them."""
    row: str
    """Regular expression that finds them."""
    seen: str
    """Expression of the chat template for what the model sees of a board, the content of `m`."""
    skill: float
    """Share of the turns of a demonstration that are best moves."""
    slips: float
    """Share of the turns that are random moves; in the others the player waits."""
    turns: int
    """Largest number of turns of a demonstration."""
    episodes: int
    """Number of demonstrations."""


def chat_template(seen: str) -> str:
    """Return a template that marks boards and moves.

    Args:
        seen: see `Game`.
    """
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}<move>{{ m.content }}<eos>"
        f"{{% else %}}<board>{{{{ {seen} }}}}{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}<move>{% endif %}"
    )


def make_model(folder: Path, game: Game) -> None:
    """Write a model with random weights, and its tokenizer."""
    tokenizer = tokenizer_of(
        [*MOVES, WAIT, *game.rows],
        splitter([*MOVES, WAIT, game.row]),
        roles=ROLES,
        chat_template=chat_template(game.seen),
    )
    write_model(folder, tokenizer, positions=512)


def demonstration(game: Game, seed: int, dice: random.Random) -> Messages:
    """Return an episode of the hesitant player as messages. It ends where nothing can be won."""
    board = game.new()
    shown, _ = board.reset(seed=seed)
    messages: Messages = []
    for _ in range(game.turns):
        best = game.best(shown)
        if best is None:
            break
        slip = dice.choice(list(MOVES))
        weights = (game.skill, game.slips, 1 - game.skill - game.slips)
        (move,) = dice.choices((best, slip, WAIT), weights)
        messages += [{"role": "user", "content": shown}, {"role": "assistant", "content": move}]
        shown, _, over, _, _ = board.step(move)
        if over:
            break
    return messages


def first_boards(game: Game, seeds: Iterable[int]) -> dict[int, str]:
    """Return the board with which each seed begins."""
    return {seed: game.new().reset(seed=seed)[0] for seed in seeds}


def demonstrations(game: Game, count: int, dice: random.Random) -> Iterator[Messages]:
    """Yield demonstrations on boards that are not held out."""
    held_out, seed = set(first_boards(game, HELD_OUT).values()), FIRST_SEED
    while count:
        messages = demonstration(game, seed, dice)
        seed += 1
        if messages[0]["content"] not in held_out:
            count -= 1
            yield messages


def tasks(game: Game) -> Iterator[dict[str, Any]]:
    """Yield the tasks of training: seeds of boards that are not held out."""
    held_out = set(first_boards(game, HELD_OUT).values())
    for seed, board in first_boards(game, TRAIN).items():
        if board not in held_out:
            yield {"prompt": board, "seed": seed}


def make(game: Game, out: Path, seed: int) -> None:
    """Write tasks and demonstrations, and train the model on the demonstrations."""
    warm = out / "warm_start"
    shown = demonstrations(game, game.episodes, random.Random(seed))
    write_jsonl(out / "train.jsonl", tasks(game))
    write_jsonl(warm / "train.jsonl", ({"messages": messages} for messages in shown))
    torch.manual_seed(seed)
    make_model(warm / "model", game)
    warm_start(game.example, out, seed)


def main(game: Game, purpose: str) -> None:
    """Run the script of a game.

    Args:
        purpose: what the script says about itself.
    """
    run_script(partial(make, game), f"outputs/{game.name}", purpose.splitlines()[0])
