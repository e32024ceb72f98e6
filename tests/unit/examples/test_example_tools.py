"""What the examples with tools show their model, and the questions that it gets."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from examples.tools import (
    ASKED,
    HELD_OUT,
    KINDS,
    TRAIN,
    Errand,
    episode,
    make_tokenizer,
    questions,
    write_questions,
)
from roll.config import load_config
from roll.config.agentic import AgenticConfig
from roll.core.types import Message
from roll.envs.tools.environment import Tools
from roll.envs.tools.formats.api import Call, Malformed
from roll.envs.tools.formats.hermes import Hermes
from roll.envs.tools.mcp_servers import close_shared
from tests.runs import ROOT


def test_demonstrations_are_written_in_the_tokens_of_the_model() -> None:
    tokenizer, dice = make_tokenizer(), random.Random(0)
    for number, kind in itertools.product(range(50), KINDS):
        messages = episode(KINDS[kind](dice), dice)
        for message in messages:
            tokens = tokenizer.encode(message["content"], add_special_tokens=False)
            assert tokenizer.unk_token_id not in tokens
            if message["role"] == "assistant":
                assert tokenizer.decode(tokens) == message["content"], number
        assert len(tokenizer.apply_chat_template(messages)["input_ids"]) < 64


def test_the_model_copies_over_the_same_distance_in_every_call() -> None:
    """So a head that looks back so far suffices, and the tiny model learns it."""
    tokenizer, dice, distances = make_tokenizer(), random.Random(0), set()
    for kind in KINDS:
        errand = KINDS[kind](dice)
        messages = [
            {"role": "user", "content": errand.question},
            {"role": "assistant", "content": "".join(errand.call)},
        ]
        tokens = tokenizer.apply_chat_template(messages)["input_ids"]
        shown = tokenizer.convert_ids_to_tokens(tokens)
        turn = shown.index("<turn>")
        asked = [place for place in range(turn) if shown[place] in shown[turn:]]
        distances |= {shown.index(shown[place], turn) - place for place in asked}
    assert len(distances) == 1


def test_agents_call_rightly_or_are_told_what_was_wrong() -> None:
    kinds, dice = {Call: 0, Malformed: 0}, random.Random(0)
    for kind in ASKED:
        for _ in range(300):
            messages = episode(KINDS[kind](dice), dice)
            for said, answer in itertools.pairwise(messages[1:]):
                if said["role"] == "assistant":
                    (call,) = Hermes().parse(said["content"]).calls
                    kinds[type(call)] += 1
                    assert answer["content"].startswith("Error: ") == isinstance(call, Malformed)
    assert 0.45 < kinds[Malformed] / sum(kinds.values()) < 0.6


async def played(kwargs: Mapping[str, Any], errand: Errand) -> tuple[str, float]:
    """What the tool says to the right call, and the reward of the right answer."""
    env = Tools(**kwargs)
    try:
        await env.reset(options={"prompt": errand.question, "answer": errand.answer})
        said, _, over, _, _ = await env.step("".join(errand.call))
        assert not over
        assert isinstance(said, list)
        (message,) = said
        assert isinstance(message, Message)
        _, reward, over, _, info = await env.step(errand.answer)
        assert over
        assert (info["tool_calls"], info["malformed"], info["tool_errors"]) == (1, 0, 0)
        return message.content, reward
    finally:
        await env.close()
        await close_shared()


@pytest.mark.parametrize("kind", ASKED)
def test_the_tools_of_the_run_file_say_what_the_demonstrations_show(
    kind: str, tmp_path: Path
) -> None:
    asked = questions(random.Random(0))
    write_questions(tmp_path, asked)
    path = ROOT / "examples/agentic_tools/run.yaml"
    written = path.read_text(encoding="utf-8").replace("outputs/tools", str(tmp_path))
    written = written.replace("[python, examples", f"[{sys.executable}, {ROOT}/examples")
    (tmp_path / "run.yaml").write_text(written, encoding="utf-8")
    config = load_config(tmp_path / "run.yaml").config
    assert isinstance(config, AgenticConfig)
    errand = asked[kind][-1]
    assert asyncio.run(played(config.environments[kind].kwargs, errand)) == (errand.result, 1.0)


def test_held_out_questions_are_in_no_training_data(tmp_path: Path) -> None:
    write_questions(tmp_path, questions(random.Random(0)))
    for kind in ASKED:
        train, held_out = (
            {json.loads(line)["prompt"] for line in (tmp_path / f"{kind}{end}.jsonl").open()}
            for end in ("", "_held_out")
        )
        assert (len(train), len(held_out)) == (TRAIN, HELD_OUT)
        assert not train & held_out
