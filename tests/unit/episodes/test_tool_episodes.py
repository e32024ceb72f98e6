"""Whole episodes with tools, with every chat template: trained is what the policy wrote."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from roll.config.sections.environment import EnvironmentConfig
from roll.core.completion import NOBODY, FinishReason
from roll.core.errors import ConfigError, EnvironmentFailedError
from roll.core.types import GenerateRequest, Prompt
from roll.envs.host import EnvHost
from roll.envs.loading import load_env
from roll.rollout.types import Group, GroupTask, ScoredSample
from tests.episodes import Writer, played
from tests.unit.tools.test_tool_turns import CALLS, encoded, turns_of

TASK = GroupTask(Prompt("q:0", (), "What is 17 + 4?", "21", "q"), step=0)
ANSWERS = {"gpt_oss": "<|channel|>final<|message|>21"}


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def answered(name: str, **options: Any) -> tuple[ScoredSample, Writer, list[list[int]]]:
    """The sample of an episode with two calls and an answer, the engine, and what it wrote."""
    format_name, call = CALLS[name]
    turns, end = turns_of(name)
    config = EnvironmentConfig.model_validate(
        {
            "env": "tools",
            "kwargs": {
                "tools": ["tests.unit.episodes.test_tool_episodes:add"],
                "format": format_name,
            },
            "tags": ("q",),
            "special_tokens": "show",
            **options,
        }
    )
    written = [call, call, ANSWERS.get(name, "21")]
    turn_tokens = [[*encoded(turns, each), end] for each in written]

    def answer(request: GenerateRequest) -> tuple[list[int], FinishReason]:
        return turn_tokens[int(request.id.rpartition(".")[2])], FinishReason.STOP

    writer = Writer(answer)

    async def play() -> Group:
        host = EnvHost("q", config, load_env("q", config), turns)
        return await played(writer, host, TASK, max_tokens=20_000)

    (one,) = asyncio.run(play()).samples
    return one, writer, turn_tokens


@pytest.mark.parametrize("name", sorted(CALLS))
def test_an_episode_holds_the_tokens_of_the_policy_and_of_the_template(name: str) -> None:
    one, writer, turn_tokens = answered(name)
    turns, _ = turns_of(name)
    assert one.reward == 1.0
    assert (one.parts["q/tool_calls"], one.parts["q/malformed"]) == (2, 0)
    completion = one.sample.completion
    pairs = list(zip(completion.tokens, completion.versions, strict=True))
    own = [token for token, version in pairs if version != NOBODY]
    assert own == [token for turn in turn_tokens for token in turn]
    others = [token for token, version in pairs if version == NOBODY]
    reply = turns.tokenizer.decode(others, skip_special_tokens=False)
    assert reply.count("21") == 2
    whole = [*one.sample.prompt.tokens, *completion.tokens]
    for request in writer.requests:
        assert list(request.prompt_tokens) == whole[: len(request.prompt_tokens)]


REFUSED = {
    "gpt_oss": (ConfigError, r"environments\.q\.history"),
    "mistral_small_3_2": (EnvironmentFailedError, "the chat template refuses"),
}
"""Templates that take results of tools only behind a call that they know as such."""


@pytest.mark.parametrize("name", sorted(set(CALLS) - set(REFUSED)))
def test_with_fork_results_follow_the_turns_as_the_template_renders_them(name: str) -> None:
    one, writer, turn_tokens = answered(name, history="fork")
    assert one.reward == 1.0
    found = []
    for turn in one.turns:
        row = one.rows[turn.row]
        whole = [*row.prompt.tokens, *row.completion.tokens]
        begin = len(row.prompt.tokens) + turn.begin
        found.append((tuple(whole[:begin]), whole[begin : begin + turn.end - turn.begin]))
    prompts = [tuple(request.prompt_tokens) for request in writer.requests]
    assert found == list(zip(prompts, turn_tokens, strict=True))
    turns, _ = turns_of(name)
    last = turns.tokenizer.decode(list(prompts[-1]), skip_special_tokens=False)
    assert last.count("21") >= 2


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_with_fork_a_template_that_cannot_is_refused(name: str) -> None:
    error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        answered(name, history="fork")
