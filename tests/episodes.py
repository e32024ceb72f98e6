"""Real episodes over a scripted engine, for tests of what policy and environment say."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from roll.config.sections.environment import EnvironmentConfig
from roll.core.completion import Completion, FinishReason, VersionRuns
from roll.core.types import GenerateRequest, Heartbeat, Prompt, SamplingParams
from roll.data.tasks import options_of
from roll.envs.agents.host import AgentHost
from roll.envs.host import EnvHost
from roll.envs.observed import Observed
from roll.rollout.episodes.episodes import Episodes, Hosts
from roll.rollout.episodes.failed import FailedEpisodes
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.replica import Replica
from roll.rollout.types import Group, GroupTask


@dataclass
class Writer:
    """Engine whose answers a test writes: tokens, and why they ended, of each request."""

    answer: Callable[[GenerateRequest], tuple[list[int], FinishReason]]
    requests: list[GenerateRequest] = field(default_factory=list)
    version: int = 7
    logprob: Callable[[GenerateRequest], float] = lambda request: -0.25
    """Log-prob of each token of an answer."""

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self.requests.append(replace(request, prompt_tokens=tuple(request.prompt_tokens)))
        await asyncio.sleep(0)
        tokens, finish = self.answer(request)
        runs = VersionRuns.of_tokens([self.version] * len(tokens))
        text = " ".join(map(str, tokens))
        logprobs = [self.logprob(request)] * len(tokens)
        return [Completion.of(tokens, logprobs, runs, finish).with_text(text)]

    async def abort(self, request_id: str) -> None: ...

    async def heartbeat(self) -> Heartbeat:
        return Heartbeat(self.version, 0, 0, {})


@dataclass
class OneHost:
    """One host of environments or agents in this process."""

    host: EnvHost | AgentHost
    name: str = field(init=False)
    config: EnvironmentConfig = field(init=False)

    def __post_init__(self) -> None:
        self.name, self.config = self.host.name, self.host.config

    async def open(self, episode: str, seed: int, prompt: Prompt) -> Observed:
        return await self.host.open(episode, seed, options_of(prompt))

    async def act(
        self,
        episode: str,
        action: str | array[int],
        last: int | None,
        wrote: array[int] | None = None,
    ) -> Observed:
        return await self.host.act(episode, action, last, wrote)

    def close(self, episode: str) -> None: ...


def episodes(writer: Writer, hosts: Hosts, **options: Any) -> Episodes:
    """The producer of episodes in the environments of `hosts`, whose name is the tag of tasks."""
    settings: dict[str, Any] = {
        "fleet": Fleet([Replica(0, writer, 64)]),
        "decode": lambda tokens: " ".join(map(str, tokens)),
        "hosts": {hosts.name: hosts},
        "failed": FailedEpisodes({hosts.name: 0.0}),
        "sampling": SamplingParams(temperature=1.0, max_new_tokens=1000),
        "tag_sampling": {},
        "max_tokens": 100_000,
        "samples_per_prompt": 1,
        "seed": 0,
        "request_timeout_s": 60.0,
    }
    return Episodes(**(settings | options))


async def played(
    writer: Writer, host: EnvHost | AgentHost, task: GroupTask, **options: Any
) -> Group:
    """The group of a task in a host, which is shut then."""
    try:
        return await episodes(writer, OneHost(host), **options).run(task)
    finally:
        await host.shut()
