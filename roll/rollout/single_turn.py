"""One prompt to one scored group: generate all siblings in one request, decode, reward."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from roll.core.errors import EngineError, RewardError, WaitTimeoutError
from roll.core.types import Completion, FinishReason, GenerateRequest, Sample, SamplingParams
from roll.rollout.routing import Engines
from roll.rollout.types import Group, GroupTask, GroupTiming, Score, ScoredSample


def group_seed(run_seed: int, group_id: str) -> int:
    """A seed of 48 bits from nothing but its arguments: not from time, order or process."""
    text = f"{run_seed}/{group_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big")


@dataclass(frozen=True)
class SingleTurn:
    """Runs groups of single-turn samples; `run` is what the scheduler calls, many at once.

    A group's reward starts as soon as its own generation is done, while other groups generate.
    """

    engines: Engines
    decode: Callable[[Sequence[int]], str]
    """Tokens of a response to text, special tokens left out."""
    score: Score
    sampling: SamplingParams
    samples_per_prompt: int
    seed: int
    """Of the run; each group's own is derived from it."""
    request_timeout_s: float
    greedy_baseline: bool = False
    """Whether each group also gets a greedy response (ReMax)."""
    reward_timeout_s: float = 3600.0
    """For one group. A last resort: rewards have a timeout per sample of their own."""

    async def run(self, task: GroupTask) -> Group:
        """Generate and score the siblings of `task.prompt`.

        Raises:
            WaitTimeoutError: the engine or the reward took too long; names group and replica.
            EngineError: the engine returned something else than finished siblings.
            RewardError: the verdicts do not fit the samples, or one is not finite.
        """
        started_s = time.perf_counter()
        sampled, greedy = await self._generate(task)
        generated_s = time.perf_counter()
        samples = [
            self._sample(task, str(sibling), completion)
            for sibling, completion in enumerate(sampled)
        ]
        scored = await self._score(
            task, samples + [self._sample(task, "greedy", completion) for completion in greedy]
        )
        return Group(
            task.prompt,
            scored[: len(samples)],
            task.step,
            GroupTiming(started_s, generated_s, time.perf_counter()),
            baseline=scored[-1] if greedy else None,
        )

    def _sample(self, task: GroupTask, name: str, completion: Completion) -> Sample:
        return Sample(
            id=f"{task.group_id}/{name}",
            group=task.group_id,
            prompt=task.prompt,
            completion=completion,
            response_text=self.decode(completion.tokens),
        )

    async def _generate(self, task: GroupTask) -> tuple[list[Completion], list[Completion]]:
        """The siblings, and the greedy response if there is to be one."""
        request = GenerateRequest(
            id=task.group_id,
            prompt_tokens=task.prompt.tokens,
            sampling=self.sampling,
            n=self.samples_per_prompt,
            seed=group_seed(self.seed, task.group_id),
        )
        if not self.greedy_baseline:
            return await self._ask(task, request), []
        greedy = replace(
            request,
            id=f"{task.group_id}/greedy",
            sampling=replace(self.sampling, temperature=0.0),
            n=1,
        )
        asked = [asyncio.ensure_future(self._ask(task, one)) for one in (request, greedy)]
        try:
            sampled, best = await asyncio.gather(*asked)
        finally:
            for ask in asked:
                ask.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return sampled, best

    async def _ask(self, task: GroupTask, request: GenerateRequest) -> list[Completion]:
        completions = await self.engines.generate(
            request, session=task.prompt.id, timeout_s=self.request_timeout_s
        )
        aborted = sum(c.finish is FinishReason.ABORT for c in completions)
        if len(completions) != request.n or aborted:
            raise EngineError(
                f"request {request.id} wanted {request.n} finished samples; the engine returned "
                f"{len(completions)}, {aborted} of them aborted"
            )
        return completions

    async def _score(self, task: GroupTask, samples: list[Sample]) -> tuple[ScoredSample, ...]:
        try:
            async with asyncio.timeout(self.reward_timeout_s) as limit:
                scored = tuple(await self.score(samples))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise WaitTimeoutError(
                f"the rewards of group {task.group_id} did not finish within "
                f"{self.reward_timeout_s:g} s"
            ) from error
        expected = [sample.id for sample in samples]
        found = [one.sample.id for one in scored]
        if found != expected:
            raise RewardError(
                f"rewards of group {task.group_id} came back for {found}; expected {expected}"
            )
        for one in scored:
            if not math.isfinite(one.reward):
                raise RewardError(
                    f"sample {one.sample.id} has reward {one.reward}; expected a finite number"
                )
        return scored
