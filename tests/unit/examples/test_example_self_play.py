"""Demonstrations of the self-play example, and what its model reads."""

from __future__ import annotations

import random

from examples.tic_tac_toe import FIELDS, OPENING, best_moves, game, make_tokenizer
from roll.config import load_config
from roll.config.agentic import AgenticConfig
from roll.envs.built_in.boards.self_play import SelfPlay
from roll.envs.built_in.boards.tic_tac_toe import TicTacToe
from tests.runs import ROOT

LINES = ["123", "456", "789", "147", "258", "369", "159", "357"]


def won(state: str, sign: str) -> bool:
    return any(all(state[int(name) - 1] == sign for name in line) for line in LINES)


def value(state: str) -> int:
    """Result for the player to move (X) if both play perfectly, by trying everything."""
    if won(state, "O"):
        return -1
    if "_" not in state:
        return 0
    return max(-value(after(state, i)) for i, sign in enumerate(state) if sign == "_")


def after(state: str, place: int) -> str:
    moved = state[:place] + "X" + state[place + 1 :]
    return moved.translate(str.maketrans("XO", "OX"))


def test_the_best_moves_are_those_that_keep_the_value_of_a_board() -> None:
    for state in ("XO__O___X", "_O__X____", "XX_OO____", "X_O_O___X"):
        best = {
            FIELDS[i]
            for i, s in enumerate(state)
            if s == "_" and -value(after(state, i)) == value(state)
        }
        assert set(best_moves(state)) <= best


def test_demonstrations_are_allowed_games_in_tokens_of_the_model() -> None:
    tokenizer, dice = make_tokenizer(), random.Random(0)
    assert len({*tokenizer.get_vocab().values()}) == len(tokenizer)
    for seed in range(50):
        for messages in game(seed, dice):
            tokens = tokenizer.apply_chat_template(messages)["input_ids"]
            assert tokenizer.unk_token_id not in tokens
            said = "".join(message["content"] for message in messages)
            assert tokenizer.decode(tokens, skip_special_tokens=True) == said
            assert len(tokens) == len(messages) // 2 * (3 + len("bmwe"))
            for board, move in zip(messages[::2], messages[1::2], strict=True):
                assert move["content"] in board["content"], "a free field shows its number"


def test_validation_shows_its_boards_as_training_does() -> None:
    config = load_config(ROOT / "examples/agentic_self_play/run.yaml").config
    assert isinstance(config, AgenticConfig)
    playing = config.environments["game"].kwargs
    assert playing["opening"] == OPENING
    perfect = TicTacToe(**config.environments["perfect"].kwargs)
    assert perfect.strength == 1
    own = SelfPlay(**{**playing, "opening": 0})
    seed = next(i for i in range(9) if "O" not in perfect.reset(seed=i)[0])
    assert perfect.reset(seed=seed)[0] == own.reset(seed=0)[0]
