"""Single-turn rollout: generates, decodes and scores the siblings (samples) of one prompt."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from roll.core.completion import Completion, Written
from roll.core.errors import RewardError
from roll.core.step_rewards import require_reward
from roll.core.types import GenerateRequest, Prompt, Sample, SamplingParams
from roll.rollout.async_utils import SharedTimeout, all_or_first_error, first_done
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.types import (
    Group,
    GroupTask,
    GroupTiming,
    Score,
    ScoredSample,
    ScoreGroup,
)

REWARD_TIMEOUT_S = 3600.0
"""Shortest time limit for the rewards of one request, in seconds."""


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
    score_group: ScoreGroup | None = None
    """Function that adds the rewards that see all siblings, once the last one is finished; None if
    there are no such rewards. The greedy response is no sibling."""
    separate_siblings: bool = False
    """True: each sibling is a separate request. False: all siblings of a group are one request. The
    samples are the same."""
    redundant: int = 0
    """Number of siblings generated beyond `samples_per_prompt`. The siblings that finish first make
    the group. Takes effect only with `separate_siblings`."""
    greedy_baseline: bool = False
    """True: each group also gets a greedy response (ReMax)."""
    tag_sampling: Mapping[str, SamplingParams] = field(default_factory=dict)
    """Sampling of prompts with these tags, in place of `sampling`."""
    tag_greedy: Mapping[str, bool] = field(default_factory=dict)
    """Whether groups with these tags get a greedy response, in place of `greedy_baseline`."""
    with_patches: Callable[[Prompt], Awaitable[Prompt]] | None = None
    """Function that returns a prompt with the patches of its pictures; None if no prompt has
    pictures."""
    reward_timeout_s: float = REWARD_TIMEOUT_S
    """Time limit for the rewards of the samples of one request, and for those of the group, in
    seconds; infinity sets none. Normally not reached, because each reward has its own time
    limit."""
    _reward_limit: SharedTimeout = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_reward_limit", SharedTimeout(self.reward_timeout_s))

    async def run(self, task: GroupTask) -> Group:
        """Generate and score the siblings of `task.prompt`.

        Raises:
            WaitTimeoutError: the engine or the reward took too long; the message names the request
                and the replica, or the group.
            EngineError: the engine refused the request, or returned a wrong number of samples.
            RewardError: the scored samples are not those of the group, or a reward is not finite.
            PictureError: a picture of the prompt cannot be made into patches.
        """
        name, prompt = task.group_id, task.prompt
        if self.with_patches is not None:
            prompt = await self.with_patches(prompt)
        group = UnfinishedGroup(prompt, name, group_seed(self.seed, name), _Clock())
        work = [self._siblings(group)]
        if self.tag_greedy.get(task.prompt.tag, self.greedy_baseline):
            work.append(self._greedy(group))
        samples, *baseline = await all_or_first_error(work)
        if self.score_group is not None:
            before = [one.sample for one in samples]
            with self._reward_limit.naming(f"the rewards of group {name}"):
                samples = await self.score_group(samples)
            _check_scored(samples, before, name)
        clock = group.clock
        timing = GroupTiming(clock.started_s, clock.generated_s, clock.now_s())
        return Group(
            prompt,
            tuple(samples),
            task.step,
            timing,
            baseline=baseline[0][0] if baseline else None,
        )

    async def _siblings(self, group: UnfinishedGroup) -> list[ScoredSample]:
        """Generate and score the siblings of a group.

        They are one request with the seed of the group; or, with `separate_siblings`, a request
        each, with seeds that count up from it. Then `redundant` further siblings are generated, and
        those that end last are stopped and left out.
        """
        wanted = self.samples_per_prompt
        if not self.separate_siblings:
            request = self._request(group, group.name, group.seed, n=wanted)
            return await self._ask(group, request, range(wanted))
        each = [
            self._ask(group, self._request(group, f"{group.name}/{i}", group.seed + i), (i,))
            for i in range(wanted + self.redundant)
        ]
        return [scored for part in await first_done(each, wanted) for scored in part]

    async def _greedy(self, group: UnfinishedGroup) -> list[ScoredSample]:
        """Generate and score the greedy response to the prompt, as a list of one."""
        request = self._request(group, f"{group.name}/greedy", group.seed)
        sampling = replace(request.sampling, temperature=0.0)
        return await self._ask(group, replace(request, sampling=sampling), ("greedy",))

    def _request(self, group: UnfinishedGroup, name: str, seed: int, n: int = 1) -> GenerateRequest:
        """Return the request `name` for `n` responses to the group's prompt, with the sampling of
        its tag."""
        sampling = self.tag_sampling.get(group.prompt.tag, self.sampling)
        prompt = group.prompt
        return GenerateRequest(name, prompt.tokens, sampling, n, seed, prompt.pictures)

    async def _ask(
        self, group: UnfinishedGroup, request: GenerateRequest, names: Iterable[int | str]
    ) -> list[ScoredSample]:
        """Let the fleet generate the completions of a request; decode and score them.

        Args:
            names: last part of the id of each sample, one for each completion.

        Raises:
            WaitTimeoutError: the rewards took longer than `reward_timeout_s`, or the engine made no
                progress.
            EngineError: see `Fleet.generate`.
            RewardError: the scored samples are others, or a reward is not finite.
        """
        completions = await self.fleet.generate(
            request, session=group.prompt.id, timeout_s=self.request_timeout_s
        )
        return await self._scored(group, completions, names)

    async def _scored(
        self,
        group: UnfinishedGroup,
        completions: Sequence[Completion],
        names: Iterable[int | str],
    ) -> list[ScoredSample]:
        """Decode and score completions of a group; the arguments and errors are those of `_ask`."""
        group.clock.generated_s = group.clock.now_s()
        samples = [
            Sample(
                f"{group.name}/{name}",
                group.name,
                group.prompt,
                completion,
            )
            for name, completion in zip(names, self._decoded(group, completions), strict=True)
        ]
        with self._reward_limit.naming(f"the rewards of group {group.name}"):
            scored = list(await self.score(samples))
        _check_scored(scored, samples, group.name)
        return scored

    def _decoded(
        self, group: UnfinishedGroup, completions: Sequence[Completion]
    ) -> list[Completion]:
        """Return the completions with their texts. Tokens that are elsewhere have theirs."""
        sampling = self.tag_sampling.get(group.prompt.tag, self.sampling)
        return [
            one.with_text(sampling.text_of(one, self.decode))
            if isinstance(one.content, Written) and one.content.text is None
            else one
            for one in completions
        ]


@dataclass(frozen=True, slots=True)
class UnfinishedGroup:
    """Group whose requests are under way, as they all know it."""

    prompt: Prompt
    name: str
    """Id of the group."""
    seed: int
    clock: _Clock


def _check_scored(scored: Sequence[ScoredSample], samples: Sequence[Sample], group_id: str) -> None:
    """Raise RewardError unless `scored` has the ids of `samples`, in order, and rewards with which
    a step can compute."""
    found, expected = [one.sample.id for one in scored], [sample.id for sample in samples]
    if found != expected:
        raise RewardError(f"rewards of group {group_id} came back for {found}; expected {expected}")
    for one in scored:
        try:
            require_reward(one.reward, f"the reward of sample {one.sample.id}, the sum of all,")
        except ValueError as error:
            raise RewardError(f"{error}; look at the rewards and their `weight`") from None


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
