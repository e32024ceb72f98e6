"""Turns prompts into accepted groups: bounded in flight and in age, rejected ones replaced.

Loops: none of its own. Each group is a task that waits for an engine and then for its rewards; both
waits have time limits. When a task ends, its callback settles it and begins as many more as the
budget allows, also between two `collect`s, while the driver trains. `collect` waits until the
buffer has what a step needs, and is unblocked by any task that ends, by an error in one, or by its
own cancellation. `close` ends what still runs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from roll.core.metrics import Metrics, Sum
from roll.core.types import Prompt
from roll.rollout.budget import Budget
from roll.rollout.replay import Entry, ReplayBuffer
from roll.rollout.serialization import from_json, to_json
from roll.rollout.types import Group, GroupFilter, GroupTask, RunGroup


class PromptSource(Protocol):
    """Where prompts come from. Every prompt taken is settled, replaced or put back, once."""

    def __next__(self) -> Prompt:
        """Raises StopIteration where the data ends."""
        ...

    def replace(self, prompt: Prompt) -> None:
        """It is used up without result: the next prompt comes from the same source."""
        ...

    def put_back(self, prompt: Prompt) -> None:
        """It was taken for nothing: offer it again, before any other of its source."""
        ...

    def schedule(self, count: int) -> list[str]:
        """The sources of the next `count` prompts that are settled."""
        ...

    def settle(self, prompt: Prompt) -> None:
        """It gave a group that a step trains on."""
        ...


@dataclass(frozen=True, slots=True)
class CollectStats:
    """What happened since the last `collect` ended."""

    begun: int
    """Groups."""
    rejected: dict[str, int]
    """Groups that a filter refused, by reason."""
    aborted: int
    """Groups stopped while they ran, because they would have been too old."""
    surplus: int
    """Groups that ended well and became too old before they were needed."""
    generated_tokens: int
    """Response tokens of all groups that ended, used or not."""
    elapsed_s: float
    generate_s: float
    """Time in which at least one of these groups was being generated."""
    reward_s: float
    """Time in which at least one of them was being scored; overlaps `generate_s`."""

    @property
    def num_rejected(self) -> int:
        return sum(self.rejected.values())

    def metrics(self) -> Metrics:
        """As `rollout/...`; the durations are left to the caller's timers."""
        return Metrics(
            {
                "rollout/started_groups": Sum(self.begun),
                "rollout/rejected_groups": Sum(self.num_rejected),
                "rollout/aborted_groups": Sum(self.aborted + self.surplus),
                "rollout/generated_tokens": Sum(self.generated_tokens),
            }
        )


@dataclass(frozen=True, slots=True)
class CollectResult:
    groups: list[Group]
    """Accepted; by source in the order of their prompts, sources in turns."""
    unused: tuple[Prompt, ...]
    """Put back, because their groups would have been too old for the next step."""
    stats: CollectStats


@dataclass
class _Counts:
    """What `CollectStats` is made of."""

    since_s: float
    begun: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    ended: list[Group] = field(default_factory=list)


@dataclass
class GenerateScheduler:
    """Groups for one step after the other. All calls come from one event loop.

    With `max_staleness` 0 nothing runs between two `collect`s. Without extra prompts the result
    then depends on the prompts and on what `run_group` returns, never on which group ends first;
    with extra prompts the fastest groups win, which favours short responses. With `max_staleness`
    k groups for the next k steps are begun ahead; a step waits for a group that would be too old
    for the next one, unless there are extra prompts.

    A `collect` that fails or is cancelled puts all prompts back.
    """

    prompts: PromptSource
    run_group: RunGroup
    budget: Budget
    filters: Sequence[GroupFilter] = ()
    """A group is rejected by the first filter that gives a reason."""
    buffer: ReplayBuffer = field(init=False)
    _tasks: dict[int, asyncio.Task[Group]] = field(default_factory=dict, init=False, repr=False)
    _tries: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    """Prompt -> groups of it that were begun with the present version."""
    _version: int = field(default=0, init=False, repr=False)
    _next_step: int = field(default=0, init=False, repr=False)
    _error: BaseException | None = field(default=None, init=False, repr=False)
    _exhausted: bool = field(default=False, init=False, repr=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False, repr=False)
    _counts: _Counts | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.buffer = ReplayBuffer(self.budget.max_staleness)

    async def collect(self, step: int) -> CollectResult:
        """The groups of `step`, which trains the weights of version `step`; one call at a time.

        Raises:
            RollError: the step used up its prompts, or the data ended.
            Exception: the first that `run_group` raised since the last call; the other groups are
                stopped before.
        """
        if step != self._version:
            self._version = step
            self._tries.clear()
        self._next_step = step
        self._exhausted = False
        try:
            self._begin_more()
            schedule = await self._wait_for(step)
            taken = self.buffer.choose(schedule)
            expired = self.buffer.expired(step + 1, besides=taken)
            aborted = sum(entry.group is None for entry in expired)
            counts = self._take_counts()
            await self._give_back(expired)
        except BaseException:
            await self.close()
            raise
        for entry in taken:
            self.buffer.remove(entry)
            self.prompts.settle(entry.prompt)
        self._next_step = step + 1
        self._begin_more()
        return CollectResult(
            [entry.group for entry in taken if entry.group is not None],
            tuple(entry.prompt for entry in expired),
            _stats(counts, aborted, len(expired) - aborted),
        )

    async def close(self) -> None:
        """Stop what runs and put all prompts back."""
        self._next_step = self._version + self.budget.max_staleness + 1  # nothing more may begin
        await self._give_back(list(self.buffer.entries()))

    def state(self) -> dict[str, Any]:
        """Groups that wait, and the prompts of those that run; JSON-able.

        The state of the prompts counts them as under way, so both belong together.
        """
        entries = list(self.buffer.entries())
        return {
            "running": [entry.prompt.id for entry in entries if entry.group is None],
            "waiting": [
                {"version": entry.version, "group": to_json(entry.group)}
                for entry in entries
                if entry.group is not None
            ],
        }

    def restore(self, state: dict[str, Any], find: Callable[[str], Prompt]) -> None:
        """Take up `state`; what ran begins anew. `find` gives the prompt of an id."""
        for row in state["waiting"]:
            self.buffer.keep(from_json(row["group"], find), row["version"])
        for prompt_id in reversed(state["running"]):
            self.prompts.put_back(find(prompt_id))

    async def _wait_for(self, step: int) -> list[str]:
        """Wait until the groups of `step` are there; returns the sources they are to be from."""
        schedule = self.prompts.schedule(self.budget.groups_per_step)
        needed = Counter(schedule)
        while True:
            if self._error is not None:
                raise self._error
            waits_for_due = not self.budget.extra and self.buffer.due(step)
            if self.buffer.can_take(needed) and not waits_for_due:
                return schedule
            rejected = self._counts.rejected if self._counts else Counter[str]()
            if rejected.total() > self.budget.max_rejected or not self._tasks:
                raise self.budget.gave_up(step=step, ready=self.buffer.ready, rejected=rejected)
            self._changed.clear()
            await self._changed.wait()

    def _begin_more(self) -> None:
        """Begin groups as far as the budget allows; an error is kept for `collect`."""
        if self._counts is None:
            self._counts = _Counts(asyncio.get_running_loop().time())
        room = self.budget.may_begin(
            outstanding=len(self.buffer),
            running=self.buffer.running,
            ahead=self._next_step - self._version,
        )
        for _ in range(0 if self._error or self._exhausted else room):
            try:
                prompt = next(self.prompts)
            except StopIteration:
                self._exhausted = True
                return
            except Exception as error:  # noqa: BLE001 - raised by `collect`
                self._error = error
                return
            self._begin(prompt, self._counts)

    def _begin(self, prompt: Prompt, counts: _Counts) -> None:
        entry = self.buffer.begin(prompt, self._version)
        task = GroupTask(prompt, self._version, self._tries[prompt.id])
        self._tries[prompt.id] += 1
        counts.begun += 1
        running = asyncio.ensure_future(self.run_group(task))
        self._tasks[entry.number] = running
        running.add_done_callback(partial(self._settle, entry))

    def _settle(self, entry: Entry, task: asyncio.Task[Group]) -> None:
        """Accept or reject a group that has ended, and begin others."""
        if self._tasks.pop(entry.number, None) is None or task.cancelled():
            return  # given back
        assert self._counts is not None
        try:
            group = task.result()
            reason = next((r for f in self.filters if (r := f(group)) is not None), None)
        except Exception as error:  # noqa: BLE001 - raised by `collect`
            self._error = self._error or error
            self._tasks[entry.number] = task
        else:
            self._counts.ended.append(group)
            if reason is None:
                self.buffer.accept(entry, group)
            else:
                self._counts.rejected[reason] += 1
                self.buffer.remove(entry)
                self.prompts.replace(entry.prompt)
            self._begin_more()
        self._changed.set()

    async def _give_back(self, entries: Sequence[Entry]) -> None:
        """Stop those that run and wait until they have ended; their errors no longer matter.

        The wait ends because every wait inside a group is bounded, cancelled or not.
        """
        running = [task for e in entries if (task := self._tasks.pop(e.number, None)) is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for entry in reversed(entries):
            self.buffer.remove(entry)
            self.prompts.put_back(entry.prompt)

    def _take_counts(self) -> _Counts:
        counts = self._counts
        assert counts is not None
        self._counts = _Counts(asyncio.get_running_loop().time())
        return counts


def _stats(counts: _Counts, aborted: int, surplus: int) -> CollectStats:
    now_s = asyncio.get_running_loop().time()
    times = [group.timing for group in counts.ended if group.timing is not None]
    return CollectStats(
        begun=counts.begun,
        rejected=dict(counts.rejected),
        aborted=aborted,
        surplus=surplus,
        generated_tokens=sum(group.num_response_tokens for group in counts.ended),
        elapsed_s=now_s - counts.since_s,
        generate_s=_covered_s([(t.started_s, t.generated_s) for t in times], counts.since_s),
        reward_s=_covered_s([(t.generated_s, t.scored_s) for t in times], counts.since_s),
    )


def _covered_s(spans: Sequence[tuple[float, float]], since_s: float) -> float:
    """Length of the union of `spans` after `since_s`."""
    covered, end = 0.0, since_s
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered
