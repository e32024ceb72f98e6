"""Make the model of the self-play example, in minutes and without a network.

A model with random weights (Qwen3 architecture; one token per row of a board, and per move) learns
by SFT from games between two players who know the rules, and often move anywhere.

    python examples/tic_tac_toe.py [--out outputs/tic_tac_toe] [--seed 0]
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from examples.demonstrations import ROLES, Messages, chat_template
from examples.tiny_model import (
    run_script,
    splitter,
    tokenizer_of,
    warm_start,
    write_jsonl,
    write_model,
)
from roll.envs.built_in.boards.match import OPPONENT, POLICY
from roll.envs.built_in.boards.self_play import SelfPlay
from roll.envs.built_in.boards.tic_tac_toe import GAME, SIZE

SKILL = 0.5
"""Share of the moves of a demonstration that are best ones; the others are random."""
OPENING = 4
"""Largest number of random moves before the first turn, in demonstrations and in the run."""
GAMES = 40_000
FIELDS = [str(number + 1) for number in range(SIZE * SIZE)]
"""Names of the fields, which are the moves."""
FIRST_SEED = 1_000_000
"""Seed of the first game of the demonstrations."""


def rows() -> list[str]:
    """Return all rows of a board, the line break that ends them included."""
    found: dict[str, None] = {}  # full rows look alike, wherever they are
    for first in range(0, len(FIELDS), SIZE):
        fields = [(POLICY, OPPONENT, name) for name in FIELDS[first : first + SIZE]]
        end = "\n" if first + SIZE < len(FIELDS) else ""
        found |= dict.fromkeys(" ".join(row) + end for row in itertools.product(*fields))
    return [*found]


def make_tokenizer() -> PreTrainedTokenizerFast:
    sign = f"[{POLICY}{OPPONENT}1-9]"
    split = splitter([rf"{sign}(?: {sign}){{{SIZE - 1}}}\n?"])
    template = chat_template("m.content")
    return tokenizer_of([*FIELDS, *rows()], split, roles=ROLES, chat_template=template)


def best_moves(state: str) -> list[str]:
    """Return the best moves of the player who has the next turn; `state` is that of `info`."""
    sets = {
        sign: sum(1 << place for place, each in enumerate(state) if each == sign)
        for sign in (POLICY, OPPONENT)
    }
    places = GAME.best_moves(sets[POLICY], sets[OPPONENT], len(FIELDS))
    return [FIELDS[place] for place in places]


def game(seed: int, dice: random.Random) -> list[Messages]:
    """Return the turns of a game of two players who often move anywhere. Each is a conversation of
    its own, as in the run, where the board says all."""
    board = SelfPlay(rules=False, opening=OPENING)
    turns: list[Messages] = []
    shown, info = board.reset(seed=seed)
    over = False
    while not over:
        free = [FIELDS[place] for place, sign in enumerate(info["state"]) if sign == "_"]
        move = dice.choice(best_moves(info["state"]) if dice.random() < SKILL else free)
        turns.append([{"role": "user", "content": shown}, {"role": "assistant", "content": move}])
        shown, _, over, _, info = board.step(move)
    return turns


def make(out: Path, seed: int) -> None:
    """Write demonstrations, and train the model on them."""
    warm, dice = out / "warm_start", random.Random(seed)
    shown = (messages for i in range(GAMES) for messages in game(FIRST_SEED + i, dice))
    write_jsonl(warm / "train.jsonl", ({"messages": messages} for messages in shown))
    torch.manual_seed(seed)
    write_model(warm / "model", make_tokenizer(), positions=512)
    warm_start("agentic_self_play", out, seed)


if __name__ == "__main__":
    run_script(make, "outputs/tic_tac_toe", (__doc__ or "").splitlines()[0])
