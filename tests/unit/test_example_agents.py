"""What the agentic examples show their models, and the environment that users copy."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from examples.agents import PEOPLE, TASKS, make_tokenizer, write_questions
from examples.demonstrations import errand_with_tools, game_of_sokoban, moves_left, pushed
from roll.envs.built_in.boards.directions import MOVES
from roll.envs.built_in.boards.sokoban import Sokoban
from roll.envs.tools.formats.api import Call, Malformed
from roll.envs.tools.formats.hermes import Hermes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(TASKS))
def test_demonstrations_are_written_in_the_tokens_of_the_model(name: str) -> None:
    task, dice = TASKS[name], random.Random(0)
    tokenizer = make_tokenizer(task.pieces)
    for seed in range(30):
        messages = task.episode(seed, dice)
        assert messages[0]["role"] == "user"
        assert messages[-1]["role"] == "assistant"
        tokens = tokenizer.apply_chat_template(messages)["input_ids"]
        assert len(tokens) <= task.most_tokens
        assert tokenizer.unk_token_id not in tokens
        for message in messages:
            encoded = tokenizer.encode(message["content"], add_special_tokens=False)
            assert tokenizer.decode(encoded) == message["content"]


def test_moves_left_are_those_of_a_search_forward() -> None:
    floor = {(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 2)}
    left = moves_left(floor, (2, 3))
    for player, box in itertools.permutations(sorted(floor), 2):
        seen, now, steps = {(player, box)}, {(player, box)}, 0
        while now and not any(state[1] == (2, 3) for state in now):
            now = {pushed(state, move, floor) for state in now for move in MOVES} - seen
            seen |= now
            steps += 1
        assert left.get((player, box)) == (steps if now else None)


def test_pushes_are_those_of_the_game() -> None:
    """A game with the moves of a demonstration shows what the demonstration does."""
    for seed in range(20):
        messages = game_of_sokoban(seed, random.Random(seed))
        env = Sokoban(size=6, boxes=1, rules=False)
        shown, _ = env.reset(seed=1_000_000 + seed)
        for said, move in zip(messages[::2], messages[1::2], strict=True):
            assert said["content"] == shown
            shown, *_ = env.step(move["content"])


def test_agents_with_tools_call_rightly_or_are_told_what_was_wrong() -> None:
    kinds = {Call: 0, Malformed: 0}
    for seed in range(300):
        messages = errand_with_tools(seed, random.Random(seed))
        for said, answer in itertools.pairwise(messages):
            calls = Hermes().parse(said["content"]).calls
            if said["role"] != "assistant":
                assert not calls
                continue
            (call,) = calls
            kinds[type(call)] += 1
            assert answer["role"] == "tool"
            assert answer["content"].startswith("Error: ") == isinstance(call, Malformed)
    assert min(kinds.values()) > 50


def test_held_out_questions_are_about_other_people(tmp_path: Path) -> None:
    write_questions(tmp_path, random.Random(0))
    for name in ("towns", "phones", "products"):
        train, held = (
            [json.loads(line) for line in (tmp_path / f"questions/{name}{end}.jsonl").open()]
            for end in ("", "_held_out")
        )
        assert len(train) == PEOPLE
        if name != "products":
            assert not {row["question"] for row in train} & {row["question"] for row in held}
    corpus = [json.loads(line) for line in (tmp_path / "towns.jsonl").open()]
    towns = {row["title"]: row["text"] for row in corpus}
    first = json.loads((tmp_path / "questions/towns.jsonl").open().readline())
    assert towns[first["question"].removeprefix("town of ")] == first["answer"]


def test_the_test_of_the_environment_to_copy_passes_as_its_page_says() -> None:
    path = "examples/agentic_custom_env/test_my_env.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
