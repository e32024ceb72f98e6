"""Whole episodes with tools, with every chat template: trained is what the policy wrote."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass

import pytest

from roll.config.sections.environment import EnvironmentConfig
from roll.core.completion import NOBODY, FinishReason
from roll.core.types import GenerateRequest, Prompt, SamplingParams
from roll.data.tasks import options_of
from roll.envs.host import EnvHost, Observed
from roll.envs.loading import load_env
from roll.rollout.episodes.episodes import Episodes
from roll.rollout.episodes.failed import FailedEpisodes
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.replica import Replica
from roll.rollout.types import Group, GroupTask
from tests.unit.test_episodes import Writer
from tests.unit.test_tool_turns import CALLS, encoded, turns_of

TASK = GroupTask(Prompt("q:0", (), "What is 17 + 4?", "21", "q"), step=0)
ANSWERS = {"gpt_oss": "<|channel|>final<|message|>21"}


@dataclass
class OneHost:
    """One host of environments in this process."""

    host: EnvHost
    config: EnvironmentConfig
    name: str = "q"

    async def open(self, episode: str, seed: int, prompt: Prompt) -> Observed:
        return await self.host.open(episode, seed, options_of(prompt))

    async def act(self, episode: str, action: str | array[int], last: int | None) -> Observed:
        return await self.host.act(episode, action, last)

    def close(self, episode: str) -> None: ...


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@pytest.mark.parametrize("name", sorted(CALLS))
def test_an_episode_holds_the_tokens_of_the_policy_and_of_the_template(name: str) -> None:
    format_name, call = CALLS[name]
    turns, end = turns_of(name)
    config = EnvironmentConfig.model_validate(
        {
            "env": "tools",
            "kwargs": {"tools": ["tests.unit.test_tool_episodes:add"], "format": format_name},
            "tags": ("q",),
            "special_tokens": "show",
        }
    )
    written = [call, call, ANSWERS.get(name, "21")]
    turn_tokens = [[*encoded(turns, each), end] for each in written]

    def answer(request: GenerateRequest) -> tuple[list[int], FinishReason]:
        return turn_tokens[int(request.id.rpartition(".")[2])], FinishReason.STOP

    writer = Writer(answer)

    async def play() -> Group:
        host = EnvHost("q", config, load_env("q", config), turns)
        episodes = Episodes(
            fleet=Fleet([Replica(0, writer, 64)]),
            decode=lambda tokens: turns.tokenizer.decode(list(tokens), skip_special_tokens=True),
            hosts={"q": OneHost(host, config)},
            failed=FailedEpisodes({"q": 0.0}),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=1000),
            tag_sampling={},
            max_tokens=20_000,
            samples_per_prompt=1,
            seed=0,
            request_timeout_s=60.0,
        )
        try:
            return await episodes.run(TASK)
        finally:
            await host.shut()

    (one,) = asyncio.run(play()).samples
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
