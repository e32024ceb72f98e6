"""The comparison of agents with TRL: both play the same game, and only equal episodes compare."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.agents_vs_trl import (
    MAX_TOKENS,
    MAX_TURNS,
    OBSERVED_TOKENS,
    ROLL,
    SIZE,
    Row,
    roll_episodes,
    unlike,
    verdict,
)
from benchmarks.agents_vs_trl_job import Lake, played
from benchmarks.calling_model import EOS, TURN, make_model
from roll.envs.built_in.boards.directions import MOVES
from roll.envs.built_in.boards.frozen_lake import FrozenLake

ROW = Row(
    step_s=3.0, rollout_s=1.0, cpu_s=6.0, peak_mb=900.0, turns=5.0, written=20.0, heard=105.0,
    reward=0.2, driver_us=150.0, steps=10,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(50))
def test_both_lakes_have_the_same_maps_walks_and_rewards(seed: int) -> None:
    theirs, ours = Lake(SIZE, MAX_TURNS, MAX_TOKENS), FrozenLake(size=SIZE, rules=False)
    dice = random.Random(seed)
    for _ in range(4):
        assert theirs.reset(seed=seed) == ours.reset(seed=seed)[0]
        for turn in range(1, MAX_TURNS + 1):
            move = dice.choice([*MOVES, "right", "down"])
            told = theirs.move(move)
            shown, reward, over, _, _ = ours.step(move)
            assert theirs.get_reward() == reward
            if over or turn == MAX_TURNS:
                assert len(told) == MAX_TOKENS, "a result without room ends an episode of TRL"
                break
            assert told == shown


def test_a_turn_and_a_map_have_the_tokens_that_are_told(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_model(tmp_path, 2, 128))
    shown, _ = FrozenLake(size=SIZE, rules=False).reset(seed=0)
    call = {"type": "function", "function": {"name": "move", "arguments": {"direction": "up"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": shown},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "move", "content": shown},
    ]
    text = tokenizer.apply_chat_template(messages[:2], tokenize=False)
    turn = {"role": "assistant", "content": text.partition(TURN)[2].removesuffix(EOS)}
    as_text = [messages[0], turn, messages[0]]
    told = [
        tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False)
        for each in (messages, as_text)
    ]
    assert told[0] == told[1], "calls and results, and turns of plain text, are the same tokens"
    assert len(told[0]) == 2 * OBSERVED_TOKENS + 4
    assert tokenizer.pad_token_id not in told[0]


def test_episodes_are_counted_by_turns_and_by_who_wrote_a_token() -> None:
    prompts, completions = [[1, 2], [1, 2]], [[7, 7, 3, 3, 3, 7], [7, 7]]
    assert played(prompts, completions, [[1, 1, 0, 0, 0, 1], [1, 1]]) == {
        "turns": 1.5,
        "written": 2.5,
        "heard": 3.5,
    }
    record = {
        "rollout/generated_tokens": 5.0, "reward/lake/turns": 1.5, "reward/lake/success": 0.5,
        "prompt_tokens/mean": 2.0, "response_tokens/mean": 4.0, "time/rollout_s": 1.0,
        "driver/receive_cpu_s": 6e-4,
    }  # fmt: skip
    found = roll_episodes(record, count=2)
    assert (found["turns"], found["written"], found["heard"]) == (1.5, 2.5, 3.5)
    assert found["driver_us"] == pytest.approx(200.0)


@pytest.mark.parametrize("name", ["turns", "written", "heard"])
def test_sides_that_differ_are_not_compared(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = replace(ROW, step_s=9.0, driver_us=None)
    rows = {"TRL": theirs, ROLL: ROW}
    assert not unlike(rows)
    assert verdict(rows)
    rows[ROLL] = replace(ROW, **{name: getattr(ROW, name) * 1.06})
    assert len(unlike(rows)) == 1
    assert not verdict(rows)
    assert f"not compared: {name} per episode" in capsys.readouterr().out


def test_the_faster_of_trl_counts_and_the_driver_has_a_goal() -> None:
    slow, fast = (replace(ROW, step_s=s, driver_us=None) for s in (9.0, 5.0))
    assert not verdict({"a": slow, "b": fast, ROLL: ROW})
    assert verdict({"a": slow, ROLL: ROW})
    assert not verdict({"a": slow, ROLL: replace(ROW, driver_us=200.0)})
