"""Scripted engines and rewards: for logic (scheduling, retries, aborts), never for numbers.

Time is counted in turns of the event loop, so that delays cost nothing and runs repeat exactly.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.core.completion import Completion, FinishReason
from roll.core.errors import EngineError
from roll.core.types import GenerateRequest, Heartbeat, Prompt, Sample, SamplingParams
from roll.output_dir.plain_json import read_arrays, write_plain
from roll.rollout.budget import Budget
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.replica import Replica
from roll.rollout.fleet.routing import LeastLoaded, RoutingPolicy
from roll.rollout.scheduler import GenerateScheduler
from roll.rollout.single_turn import SingleTurn
from roll.rollout.types import Group, GroupFilter, RunGroup, Score, ScoredSample

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=8)


def prompt(name: str, *, tokens: int = 3, tag: str = "default") -> Prompt:
    return Prompt(id=name, tokens=tuple(range(tokens)), text=name, answer="1", tag=tag)


def completion(
    *tokens: int, version: int = 0, finish: FinishReason = FinishReason.STOP
) -> Completion:
    count = len(tokens)
    return Completion.of(tokens, (-0.5,) * count, (version,) * count, finish)


def group(
    name: str,
    rewards: list[float],
    *,
    texts: list[str] | None = None,
    completions: list[Completion] | None = None,
    tag: str = "default",
    step: int = 0,
) -> Group:
    """A finished group of prompt `name` with these rewards."""
    of = prompt(name, tag=tag)
    scored = []
    for i, reward in enumerate(rewards):
        sample = Sample(
            id=f"{step}/{name}/{i}",
            group=f"{step}/{name}",
            prompt=of,
            completion=completions[i] if completions else completion(7, 1),
            response_text=texts[i] if texts else "",
        )
        scored.append(ScoredSample(sample, reward))
    return Group(of, tuple(scored), step)


def from_disk(value: Any, folder: Path) -> Any:
    """The value as it comes back from the files of a checkpoint."""
    path = folder / "value.json"
    write_plain(path, value)
    return read_arrays(json.loads(path.read_text()), folder)


@dataclass
class ScriptedEngine:
    """Answers each request after a scripted number of loop turns with siblings of one token each.

    A sibling's token is its seed modulo 1000, so equal requests give equal answers.
    """

    turns: Callable[[GenerateRequest], int | None] = lambda request: 0
    """Loop turns until the answer; None: only an abort ends the request."""
    fails: Callable[[GenerateRequest], bool] = lambda request: False
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    peak: int = 0

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        assert request.id not in self.seen, f"request {request.id} came twice"
        self.seen.append(request.id)
        stop = self.running[request.id] = asyncio.Event()
        self.peak = max(self.peak, len(self.running))
        try:
            left = self.turns(request)
            while not stop.is_set() and left != 0:
                await asyncio.sleep(0)
                left = None if left is None else left - 1
            if self.fails(request):
                raise EngineError(f"engine died on {request.id}")
            finish = FinishReason.ABORT if stop.is_set() else FinishReason.STOP
            seed = request.seed or 0
            return [completion((seed + i) % 1000, finish=finish) for i in range(request.n)]
        finally:
            del self.running[request.id]

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if request_id in self.running:
            self.running[request_id].set()

    async def heartbeat(self) -> Heartbeat:
        return Heartbeat(0, 0, 0, {})

    def replica(self, index: int = 0, *, capacity: int = 256) -> Replica:
        return Replica(index, self, capacity, abort_timeout_s=5)


@dataclass
class Prompts:
    """A source of prompts for a scheduler, with its books."""

    fresh: Iterator[Prompt]
    returned: list[Prompt] = field(default_factory=list)
    """The last one is offered first."""
    settled: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    taken: int = 0
    """Of `fresh`."""

    def __next__(self) -> Prompt:
        if self.returned:
            return self.returned.pop()
        one = next(self.fresh)
        self.taken += 1
        return one

    def replace(self, prompt: Prompt) -> None:
        self.replaced.append(prompt.id)

    def put_back(self, prompt: Prompt) -> None:
        self.returned.append(prompt)

    def schedule(self, count: int) -> list[str]:
        return [""] * count

    def settle(self, prompt: Prompt) -> None:
        self.settled.append(prompt.id)

    @property
    def offered(self) -> list[str]:
        """Ids of what was put back, in the order in which it is offered."""
        return [one.id for one in reversed(self.returned)]


def scheduler(
    prompts: Iterator[Prompt],
    run_group: RunGroup,
    *,
    groups: int = 4,
    filters: Sequence[GroupFilter] = (),
    max_staleness: int = 0,
    extra: int = 0,
    max_in_flight: int = 256,
    max_prompts_factor: float = 4.0,
) -> GenerateScheduler:
    """A scheduler of steps of `groups` groups."""
    budget = Budget(groups, max_staleness, extra, max_in_flight, max_prompts_factor)
    return GenerateScheduler(Prompts(prompts), run_group, budget, filters)


async def score_by_token(samples: list[Sample]) -> list[ScoredSample]:
    """Rewards 0 and 1, told apart by whether the token is odd."""
    await asyncio.sleep(0)
    return [ScoredSample(s, float(s.completion.tokens[0] % 2)) for s in samples]


def single_turn(
    *engines: ScriptedEngine,
    score: Score = score_by_token,
    routing: RoutingPolicy | None = None,
    samples_per_prompt: int = 2,
    seed: int = 0,
    request_timeout_s: float = 60.0,
    reward_timeout_s: float = 60.0,
    **options: Any,
) -> SingleTurn:
    """The real rollout over scripted engines."""
    replicas = [engine.replica(i) for i, engine in enumerate(engines)]
    return SingleTurn(
        fleet=Fleet(replicas, routing or LeastLoaded()),
        decode=lambda tokens: " ".join(map(str, tokens)),
        score=score,
        sampling=SAMPLING,
        samples_per_prompt=samples_per_prompt,
        seed=seed,
        request_timeout_s=request_timeout_s,
        reward_timeout_s=reward_timeout_s,
        **options,
    )
