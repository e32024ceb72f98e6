"""Single-turn rollout: generates, decodes and scores the siblings (samples) of one prompt."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from roll.core.completion import Completion
from roll.core.errors import RewardError, WaitTimeoutError
from roll.core.types import GenerateRequest, Sample, SamplingParams
from roll.rollout.async_utils import all_or_first_error, first_done
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.types import Group, GroupTask, GroupTiming, Score, ScoredSample


def group_seed(run_seed: int, group_id: str) -> int:
    """Return a 48-bit seed that depends only on the arguments, not on time, order or process."""
    text = f"{run_seed}/{group_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big")


@dataclass(frozen=True)
class SingleTurn:
    """Producer of groups of single-turn samples; the scheduler has many calls of `run` under way.

    Samples are scored as soon as their request ends, while other requests of the same group and of
    other groups still generate.
    """

    fleet: Fleet
    decode: Callable[[Sequence[int]], str]
    """Function that turns the token ids of a response into text without special tokens. It is
    called for completions that come without their text: those that several replicas wrote."""
    score: Score
    sampling: SamplingParams
    samples_per_prompt: int
    seed: int
    """Seed of the run; the seed of each group is derived from it."""
    request_timeout_s: float
    """Time in which a request must make some progress on its replica, in seconds."""
    separate_siblings: bool = False
    """True: each sibling is a separate request. False: all siblings of a group are one request. The
    samples are the same."""
    redundant: int = 0
    """Number of siblings generated beyond `samples_per_prompt`. The siblings that finish first make
    the group. Takes effect only with `separate_siblings`."""
    greedy_baseline: bool = False
    """True: each group also gets a greedy response (ReMax)."""
    reward_timeout_s: float = 3600.0
    """Time limit for the rewards of the samples of one request, in seconds. Normally not reached,
    because each reward has its own time limit per sample."""

    async def run(self, task: GroupTask) -> Group:
        """Generate and score the siblings of `task.prompt`.

        Raises:
            WaitTimeoutError: the engine or the reward took too long; the message names the request
                and the replica, or the group.
            EngineError: the engine refused the request, or returned a wrong number of samples.
            RewardError: the scored samples are not those of the group, or a reward is not finite.
        """
        clock = _Clock()
        seed = group_seed(self.seed, task.group_id)
        work = [self._siblings(task, seed, clock)]
        if self.greedy_baseline:
            work.append(self._greedy(task, seed, clock))
        samples, *baseline = await all_or_first_error(work)
        timing = GroupTiming(clock.started_s, clock.generated_s, clock.now_s())
        return Group(
            task.prompt,
            tuple(samples),
            task.step,
            timing,
            baseline=baseline[0][0] if baseline else None,
        )

    async def _siblings(self, task: GroupTask, seed: int, clock: _Clock) -> list[ScoredSample]:
        """Generate and score the siblings of a group.

        They are one request with `seed`; or, with `separate_siblings`, a request each, with seeds
        that count up from `seed`. Then `redundant` further siblings are generated, and those that
        end last are stopped and left out.
        """
        wanted = self.samples_per_prompt
        if not self.separate_siblings:
            return await self._part(task, 0, wanted, seed, clock)
        each = [self._part(task, i, 1, seed + i, clock) for i in range(wanted + self.redundant)]
        return [scored for part in await first_done(each, wanted) for scored in part]

    async def _part(
        self, task: GroupTask, first: int, n: int, seed: int, clock: _Clock
    ) -> list[ScoredSample]:
        """Generate and score siblings `first` to `first + n - 1` as one request."""
        name = f"{task.group_id}/{first}" if self.separate_siblings else task.group_id
        request = GenerateRequest(
            id=name, prompt_tokens=task.prompt.tokens, sampling=self.sampling, n=n, seed=seed
        )
        completions = await self._ask(task, request, clock)
        names = [str(first + i) for i in range(n)]
        return await self._judge(task, names, completions)

    async def _greedy(self, task: GroupTask, seed: int, clock: _Clock) -> list[ScoredSample]:
        """Generate and score the greedy response to the prompt, as a list of one."""
        request = GenerateRequest(
            id=f"{task.group_id}/greedy",
            prompt_tokens=task.prompt.tokens,
            sampling=replace(self.sampling, temperature=0.0),
            seed=seed,
        )
        return await self._judge(task, ["greedy"], await self._ask(task, request, clock))

    async def _ask(
        self, task: GroupTask, request: GenerateRequest, clock: _Clock
    ) -> list[Completion]:
        """Let the fleet generate the completions of a request; note on the clock when they came."""
        completions = await self.fleet.generate(
            request, session=task.prompt.id, timeout_s=self.request_timeout_s
        )
        clock.generated_s = clock.now_s()
        return completions

    async def _judge(
        self, task: GroupTask, names: Sequence[str], completions: Sequence[Completion]
    ) -> list[ScoredSample]:
        """Decode and score the completions of one request; `names` end the ids of its samples.

        Raises:
            WaitTimeoutError: the rewards took longer than `reward_timeout_s`.
            RewardError: the scored samples are others, or a reward is not finite.
        """
        samples = [
            Sample(
                id=f"{task.group_id}/{name}",
                group=task.group_id,
                prompt=task.prompt,
                completion=completion,
                response_text=(
                    self.decode(completion.tokens) if completion.text is None else completion.text
                ),
            )
            for name, completion in zip(names, completions, strict=True)
        ]
        try:
            async with asyncio.timeout(self.reward_timeout_s) as limit:
                scored = list(await self.score(samples))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise WaitTimeoutError(
                f"the rewards of group {task.group_id} did not finish within "
                f"{self.reward_timeout_s:g} s"
            ) from error
        _check_scored(scored, [sample.id for sample in samples], task.group_id)
        return scored


def _check_scored(scored: Sequence[ScoredSample], expected: list[str], group_id: str) -> None:
    """Raise RewardError unless `scored` has the `expected` ids, in order, and finite rewards."""
    found = [one.sample.id for one in scored]
    if found != expected:
        raise RewardError(f"rewards of group {group_id} came back for {found}; expected {expected}")
    for one in scored:
        if not math.isfinite(one.reward):
            raise RewardError(
                f"sample {one.sample.id} has reward {one.reward}; expected a finite number"
            )


class _Clock:
    """Times of one group on the clock of its event loop, in seconds."""

    def __init__(self) -> None:
        self._time = asyncio.get_running_loop().time
        self.started_s = self.now_s()
        self.generated_s = self.started_s
        """Time at which the latest request of the group returned."""

    def now_s(self) -> float:
        """Return the time now."""
        return self._time()
