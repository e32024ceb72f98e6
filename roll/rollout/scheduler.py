"""Collects accepted groups: bounded in flight, rejected ones replaced, leftovers aborted.

One loop, run by whoever awaits `collect`. It consumes prompts (handed-back ones first), starts
`run_group` tasks as far as the budget allows, and waits for any of them to end. A task waits for
an engine and then for its rewards; both waits have timeouts of their own, so the loop is always
unblocked by a result, by an error or by its own cancellation. Nothing outlives `collect`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from roll.core.errors import RollError
from roll.core.metrics import Metrics, Sum
from roll.core.types import Prompt
from roll.rollout.budget import Budget
from roll.rollout.types import Group, GroupFilter, GroupTask, RunGroup


@dataclass(frozen=True, slots=True)
class CollectStats:
    """What one `collect` cost. started = accepted + rejected + unused."""

    started: int
    """Groups begun."""
    rejected: dict[str, int]
    """Groups that a filter refused, by reason."""
    aborted: int
    """Groups stopped while they ran, because the step was full."""
    surplus: int
    """Groups that ended well in the same moment as the last one needed, and were not."""
    generated_tokens: int
    """Response tokens of all finished groups, used or not."""
    generate_s: float
    """Time in which at least one finished group was being generated."""
    reward_s: float
    """Time in which at least one finished group was being scored; overlaps `generate_s`."""

    @property
    def num_rejected(self) -> int:
        return sum(self.rejected.values())

    def metrics(self) -> Metrics:
        """As `rollout/...`; the durations are left to the caller's timers."""
        return Metrics(
            {
                "rollout/started_groups": Sum(self.started),
                "rollout/rejected_groups": Sum(self.num_rejected),
                "rollout/aborted_groups": Sum(self.aborted + self.surplus),
                "rollout/generated_tokens": Sum(self.generated_tokens),
            }
        )


@dataclass(frozen=True, slots=True)
class CollectResult:
    groups: list[Group]
    """Accepted, in the order of their prompts."""
    unused: tuple[Prompt, ...]
    """Taken from the prompts but neither accepted nor rejected; the next `collect` begins with
    them, and they are part of `GenerateScheduler.state`."""
    stats: CollectStats


@dataclass
class GenerateScheduler:
    """Turns prompts into accepted groups, a step at a time.

    Without `extra_prompts` the result depends on the prompts and on what `run_group` returns, never
    on which group ends first: prompts are started in order and exactly as many as it takes. With
    extra prompts the fastest groups win, which favours short responses.

    Every prompt taken ends up in exactly one place: accepted, rejected, or handed back and offered
    again first. A `collect` that fails or is cancelled hands all of its prompts back.
    """

    prompts: Iterator[Prompt]
    run_group: RunGroup
    filters: Sequence[GroupFilter] = ()
    """A group is rejected by the first filter that gives a reason."""
    extra_prompts: int = 0
    max_in_flight: int = 256
    max_prompts_factor: float = 4.0
    _unused: deque[Prompt] = field(default_factory=deque, init=False, repr=False)

    async def collect(self, num_groups: int, *, step: int) -> CollectResult:
        """Exactly `num_groups` accepted groups. One call at a time.

        Raises:
            RollError: the step used up its prompts, or the data ended.
            Exception: the first that `run_group` raised; the other groups are stopped before.
        """
        budget = Budget(num_groups, self.extra_prompts, self.max_in_flight, self.max_prompts_factor)
        run = _Run(budget, step, self.filters)
        try:
            while len(run.accepted) < num_groups:
                for prompt in self._take(run.may_start()):
                    run.start(prompt, self.run_group)
                if not run.running:
                    raise run.gave_up()
                await asyncio.wait(run.running, return_when=asyncio.FIRST_COMPLETED)
                run.settle()
            aborted = len(run.running)
            await run.stop()
        except BaseException:
            await run.stop()
            self._unused.extendleft(reversed(run.prompts))
            raise
        result = run.result(aborted)
        self._unused.extendleft(reversed(result.unused))
        return result

    def state(self) -> dict[str, Any]:
        """Ids of the prompts to offer first, for the checkpoint; JSON-able.

        The sampler counts them as taken, so both states belong together.
        """
        return {"unused": [prompt.id for prompt in self._unused]}

    def restore(self, state: dict[str, Any], find: Callable[[str], Prompt]) -> None:
        """Take up `state`; `find` gives the prompt of an id."""
        self._unused = deque(find(prompt_id) for prompt_id in state["unused"])

    def _take(self, count: int) -> Iterator[Prompt]:
        """The next prompts, those handed back first; fewer where a finite source ends.

        One at a time, so that a source that raises leaves no prompt between two places.
        """
        for _ in range(count):
            if self._unused:
                yield self._unused.popleft()
            else:
                yield from islice(self.prompts, 1)


class _Run:
    """The books of one `collect`; numbers are positions in the order of starting."""

    def __init__(self, budget: Budget, step: int, filters: Sequence[GroupFilter]) -> None:
        self.prompts: list[Prompt] = []
        self.running: dict[asyncio.Task[Group], int] = {}
        self.accepted: dict[int, Group] = {}
        self._budget = budget
        self._step = step
        self._filters = filters
        self._rejected: dict[int, str] = {}
        self._finished: list[Group] = []
        self._tries: Counter[str] = Counter()

    def may_start(self) -> int:
        return self._budget.may_start(
            accepted=len(self.accepted), running=len(self.running), started=len(self.prompts)
        )

    def start(self, prompt: Prompt, run_group: RunGroup) -> None:
        task = GroupTask(prompt, self._step, self._tries[prompt.id])
        self._tries[prompt.id] += 1
        self.running[asyncio.create_task(run_group(task), name=task.group_id)] = len(self.prompts)
        self.prompts.append(prompt)

    def settle(self) -> None:
        """Accept or reject what has ended, in the order of starting; the first error is raised."""
        for task, number in [item for item in self.running.items() if item[0].done()]:
            group = task.result()
            del self.running[task]
            self._finished.append(group)
            reason = next((r for f in self._filters if (r := f(group)) is not None), None)
            if reason is None:
                self.accepted[number] = group
            else:
                self._rejected[number] = reason

    async def stop(self) -> None:
        """Cancel what runs and wait until it has ended; its errors no longer matter.

        The wait ends because every wait inside a group is bounded, cancelled or not.
        """
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)

    def gave_up(self) -> RollError:
        return self._budget.gave_up(
            step=self._step,
            accepted=len(self.accepted),
            started=len(self.prompts),
            rejected=Counter(self._rejected.values()),
        )

    def result(self, aborted: int) -> CollectResult:
        """Surplus groups are not kept for the next step: other weights wrote them."""
        used = sorted(self.accepted)[: self._budget.num_groups]
        settled = {*used, *self._rejected}
        unused = tuple(p for number, p in enumerate(self.prompts) if number not in settled)
        times = [group.timing for group in self._finished if group.timing is not None]
        stats = CollectStats(
            started=len(self.prompts),
            rejected=dict(Counter(self._rejected.values())),
            aborted=aborted,
            surplus=len(self.accepted) - len(used),
            generated_tokens=sum(group.num_response_tokens for group in self._finished),
            generate_s=_covered_s([(t.started_s, t.generated_s) for t in times]),
            reward_s=_covered_s([(t.generated_s, t.scored_s) for t in times]),
        )
        return CollectResult([self.accepted[number] for number in used], unused, stats)


def _covered_s(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of `spans`."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered
