"""Scheduler that turns prompts into accepted groups, with limits on their number and staleness.

The scheduler has no loop of its own. Each group is a task that waits for an engine and then for its
rewards; both waits have time limits. When a task ends, its callback accepts or rejects the group
and starts as many more groups as the budget allows, also between two calls of `collect`, while the
driver trains. `collect` waits until the buffer has the groups that a step needs; it wakes up when
any task ends or fails, or when `collect` itself is cancelled. `close` stops the tasks that still
run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from roll.core.errors import PictureError, RollError
from roll.core.types import Prompt
from roll.distributed.remote_contents import living_nodes, node_of
from roll.rollout.budget import Budget
from roll.rollout.collect_stats import CollectCounts, CollectStats
from roll.rollout.replay import Entry, ReplayBuffer
from roll.rollout.serialization import from_plain, to_plain
from roll.rollout.types import Group, GroupFilter, GroupTask, RunGroup

logger = logging.getLogger(__name__)


class PromptSource(Protocol):
    """Source of prompts; each prompt taken goes once to `settle`, `replace` or `put_back`."""

    def __next__(self) -> Prompt:
        """Return the next prompt; raise StopIteration at the end of the data."""
        ...

    def replace(self, prompt: Prompt) -> None:
        """Mark a prompt as used up without a result; the next prompt has the same source."""
        ...

    def put_back(self, prompt: Prompt) -> None:
        """Return an unused prompt, so that it is offered again before all others of its source."""
        ...

    def schedule(self, count: int) -> list[str]:
        """Return the sources that the next `count` settled prompts must have, in order."""
        ...

    def settle(self, prompt: Prompt) -> None:
        """Mark a prompt as used: a step trains on its group."""
        ...


class Outcomes(Protocol):
    """Listener that learns from the rewards of groups which prompts to draw."""

    def observe(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """Note the rewards of a group that a step takes, or that a filter rejected."""
        ...

    def end_step(self) -> None:
        """Let what was noted take effect; called when a step has its groups."""
        ...


@dataclass(frozen=True, slots=True)
class CollectResult:
    """Groups of one step, and numbers on how `collect` got them."""

    groups: list[Group]
    """Accepted groups in the order of `PromptSource.schedule`; groups of one source are in the
    order in which they started."""
    unused: tuple[Prompt, ...]
    """Prompts put back because their groups would have been too old for the next step."""
    stats: CollectStats


@dataclass
class GenerateScheduler:
    """Scheduler that supplies the groups of one step after another; all calls need one event loop.

    With `max_staleness` 0 no group runs between two calls of `collect`. Without extra prompts the
    result then depends only on the prompts and on what `run_group` returns, not on which group ends
    first. With extra prompts a step takes the groups that end first, which favours short responses.

    With `max_staleness` k, groups for the next k steps start ahead of time. A step without extra
    prompts waits for every running group that would be too old for the next step.

    If `collect` fails or is cancelled, it puts all prompts back.
    """

    prompts: PromptSource
    run_group: RunGroup
    budget: Budget
    filters: Sequence[GroupFilter] = ()
    """Filters, asked in order; the first one that returns a reason rejects the group."""
    outcomes: Outcomes | None = None
    """Listener to the rewards of the groups; None if nothing learns from them."""
    living_nodes: Callable[[], Collection[str]] = living_nodes
    """Function that returns the ids of all nodes that live; called in a thread. Tokens of finished
    groups may be on other nodes."""
    buffer: ReplayBuffer = field(init=False)
    _tasks: dict[int, asyncio.Task[Group]] = field(default_factory=dict, init=False, repr=False)
    _tries: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    """Number of groups that started with the current version, for each prompt id."""
    _version: int = field(default=0, init=False, repr=False)
    _next_step: int = field(default=0, init=False, repr=False)
    _error: BaseException | None = field(default=None, init=False, repr=False)
    _exhausted: bool = field(default=False, init=False, repr=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False, repr=False)
    _counts: CollectCounts | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.buffer = ReplayBuffer(self.budget.max_staleness)

    async def collect(self, step: int) -> CollectResult:
        """Wait until the groups of `step` are accepted, and return them.

        The weights have version `step` when the step begins to train. Only one call may be under
        way at a time.

        Raises:
            RollError: too many groups were rejected, or the data ended.
            Exception: the first exception from the making of a group (`run_group`), a filter or
                the prompt source, also between two calls; every later call raises it again. Before
                it is raised, all groups are stopped and their prompts put back.
        """
        if step != self._version:
            self._version = step
            self._tries.clear()
        self._next_step = step
        self._exhausted = False
        try:
            # After a resume with a smaller `max_staleness`; else there are none.
            await self._give_back(self.buffer.expired(step))
            self._begin_more()
            taken = await self._choose(step)
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
            self._observe(entry.group)
        if self.outcomes is not None:
            self.outcomes.end_step()
        self._next_step = step + 1
        self._begin_more()
        return CollectResult(
            [entry.group for entry in taken if entry.group is not None],
            tuple(entry.prompt for entry in expired),
            counts.stats(aborted, len(expired) - aborted),
        )

    async def close(self) -> None:
        """Stop all running groups and put back the prompts of all running and waiting groups.

        Wait until they have ended; ignore their errors. A later `collect` starts anew.
        """
        # With this step the budget lets no more groups start.
        self._next_step = self._version + self.budget.max_staleness + 1
        await self._give_back(list(self.buffer.entries()))

    def state(self) -> dict[str, Any]:
        """Return the waiting groups and the prompt ids of the running groups, as JSON
        objects and arrays.

        Save and restore this state together with the state of `prompts`, which records the same
        prompts as taken.
        """
        entries = list(self.buffer.entries())
        return {
            "running": [entry.prompt.id for entry in entries if entry.group is None],
            "waiting": [
                {"version": entry.version, "group": to_plain(entry.group)}
                for entry in entries
                if entry.group is not None
            ],
        }

    def restore(
        self,
        state: dict[str, Any],
        find: Callable[[str], Prompt],
        *,
        fits: Callable[[Group], bool] = lambda group: True,
    ) -> None:
        """Restore what `state` returned; `find` returns the prompt of an id.

        Finished groups are kept. Prompts of running ones are put back into `prompts`, which must be
        restored before.

        Args:
            fits: function that tells whether a group is such as this session makes; others are
                generated anew.
        """
        again: list[str] = []
        for row in state["waiting"]:
            group = from_plain(row["group"], find)
            if fits(group):
                self.buffer.keep(group, row["version"])
            else:
                again.append(group.prompt.id)
        if again:
            logger.warning(
                "%d groups that waited in the checkpoint are generated anew: since settings have "
                "changed, groups have other numbers of samples (data.samples_per_prompt) or of "
                "greedy responses (algorithm.advantage)",
                len(again),
            )
        for prompt_id in reversed([*state["running"], *again]):
            self.prompts.put_back(find(prompt_id))

    async def begin_lost_again(self) -> None:
        """Give back the waiting groups whose tokens are lost with their node: they cannot be
        saved. Other prompts, or these, take their places."""
        await self._begin_again([e for e in self.buffer.entries() if e.group is not None])

    async def _choose(self, step: int) -> list[Entry]:
        """Wait for the groups of `step`, and return them. A group whose tokens are lost with their
        node is given back, and the next prompt takes its place."""
        while True:
            chosen = self.buffer.choose(await self._wait_for(step))
            if not await self._begin_again(chosen):
                return chosen

    async def _begin_again(self, entries: Sequence[Entry]) -> bool:
        """Give back those of these finished groups whose tokens are lost with their node, and start
        others; return whether there are any."""
        nodes = {node for entry in entries for node in _nodes(entry)}
        gone = nodes - set(await asyncio.to_thread(self.living_nodes)) if nodes else nodes
        lost = [entry for entry in entries if not gone.isdisjoint(_nodes(entry))]
        if not lost:
            return False
        logger.warning(
            "the tokens of %d groups are lost with node %s; their prompts begin again",
            len(lost),
            ", ".join(sorted(gone)),
        )
        await self._give_back(lost)
        self._begin_more()
        return True

    async def _wait_for(self, step: int) -> list[str]:
        """Wait until the groups of `step` are in the buffer; return the source of each group."""
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
        """Start as many groups as the budget and the data allow, none after an error; keep an error
        of the prompt source, which `collect` then raises."""
        if self._counts is None:
            self._counts = CollectCounts(asyncio.get_running_loop().time())
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

    def _begin(self, prompt: Prompt, counts: CollectCounts) -> None:
        """Start the task of a group for this prompt."""
        entry = self.buffer.begin(prompt, self._version)
        task = GroupTask(prompt, self._version, self._tries[prompt.id])
        self._tries[prompt.id] += 1
        counts.begun += 1
        running = asyncio.ensure_future(self.run_group(task))
        self._tasks[entry.number] = running
        running.add_done_callback(partial(self._settle, entry))

    def _settle(self, entry: Entry, task: asyncio.Task[Group]) -> None:
        """Accept or reject a group that has ended, and start others; keep an error of the group or
        of a filter, which `collect` then raises. Ignore a group that was given back."""
        if self._tasks.pop(entry.number, None) is None:
            return  # the prompt has been put back
        assert self._counts is not None
        try:
            group = task.result()
            reason = next((r for f in self.filters if (r := f(group)) is not None), None)
        except PictureError:  # whoever makes patches has named the prompt
            self._drop(entry, "broken picture")
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - as above
            self._error = self._error or _told(error, entry.prompt)
            self._tasks[entry.number] = task
        else:
            self._counts.ended.append((group.timing, group.num_sampled_tokens))
            if reason is None:
                self.buffer.accept(entry, group)
                self._begin_more()
            else:
                self._observe(group)
                self._drop(entry, reason)
        self._changed.set()

    def _drop(self, entry: Entry, reason: str) -> None:
        """Remove a group that is not used, and let another prompt take its place."""
        assert self._counts is not None
        self._counts.rejected[reason] += 1
        self._counts.rejected_by_tag[entry.prompt.tag] += 1
        self.buffer.remove(entry)
        self.prompts.replace(entry.prompt)
        self._begin_more()

    def _observe(self, group: Group | None) -> None:
        """Tell `outcomes` the rewards of a group; do nothing without a group or listener."""
        if group is not None and self.outcomes is not None:
            self.outcomes.observe(group.prompt, group.rewards)

    async def _give_back(self, entries: Sequence[Entry]) -> None:
        """Stop and remove the groups of `entries`, ignore their errors, and put their prompts back.

        Waits until the running groups have ended. This wait ends, because every wait inside a group
        has a time limit, also after a cancellation.
        """
        running = [task for e in entries if (task := self._tasks.pop(e.number, None)) is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for entry in reversed(entries):
            self.buffer.remove(entry)
            self.prompts.put_back(entry.prompt)

    def _take_counts(self) -> CollectCounts:
        """Return the counts so far, and begin new ones."""
        counts = self._counts
        assert counts is not None
        self._counts = CollectCounts(asyncio.get_running_loop().time())
        return counts


def _nodes(entry: Entry) -> set[str]:
    """Return the ids of the nodes with tokens of a group, without those that are in this
    process."""
    if entry.group is None:
        return set()
    baseline = [] if entry.group.baseline is None else [entry.group.baseline]
    every = (*entry.group.samples, *baseline)  # a checkpoint holds the tokens of all
    found = {node_of(scored.sample.completion.content) for scored in every}
    return {node for node in found if node is not None}


def _told(error: BaseException, prompt: Prompt) -> BaseException:
    """Return the error of a group. A cancellation that this scheduler has not asked for is one that
    code of the group let escape."""
    if not isinstance(error, asyncio.CancelledError):
        return error
    return RollError(
        f"the group of prompt {prompt.id!r} ended by a CancelledError that nobody here asked for: "
        "code that takes part in it awaited what it, or somebody else, had cancelled; catch "
        "CancelledError there"
    )
