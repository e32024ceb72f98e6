"""`ReplayBuffer`: a record of all groups from their start until they are trained on.

The buffer only keeps the record; it runs no tasks. Every group that starts has exactly one end: a
step takes it, a filter rejects it, or its prompt is put back.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from roll.core.types import Prompt
from roll.rollout.types import Group


@dataclass(slots=True)
class Entry:
    """Record of one group that has started."""

    number: int
    """Position of the group in the order in which groups started, counted from 0."""
    prompt: Prompt
    version: int
    """Version of the weights when the group started; no token of the group has an older version."""
    group: Group | None = None
    """Finished group; None while the group runs."""


@dataclass
class ReplayBuffer:
    """Record of groups that run or wait to be taken; hands out groups, the oldest first."""

    max_staleness: int = 0
    """Largest staleness (step minus version) at which a step may train on a group."""
    _entries: dict[int, Entry] = field(default_factory=dict, init=False, repr=False)
    _next: int = field(default=0, init=False, repr=False)
    _running: Counter[int] = field(default_factory=Counter, init=False, repr=False)
    """Number of running groups for each version of the weights with which groups started. A version
    without running groups has no key, so the counter stays small in a long run."""
    _ready: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    """Number of finished groups that wait to be taken, for each source of prompts."""

    def begin(self, prompt: Prompt, version: int) -> Entry:
        """Add a group that starts to run, and return its entry."""
        entry = Entry(self._next, prompt, version)
        self._next += 1
        self._entries[entry.number] = entry
        self._running[version] += 1
        return entry

    def accept(self, entry: Entry, group: Group) -> None:
        """Record that the group of `entry` has ended and waits to be taken."""
        entry.group = group
        self._ended(entry)
        self._ready[entry.prompt.source] += 1

    def remove(self, entry: Entry) -> None:
        """Remove a group that was rejected, taken for a step, or given back, running or not."""
        del self._entries[entry.number]
        if entry.group is None:
            self._ended(entry)
        else:
            self._ready[entry.prompt.source] -= 1

    def _ended(self, entry: Entry) -> None:
        """Subtract a group from the number of running groups."""
        self._running[entry.version] -= 1
        if not self._running[entry.version]:
            del self._running[entry.version]

    def keep(self, group: Group, version: int) -> None:
        """Add a group that was finished before the run was resumed."""
        self.accept(self.begin(group.prompt, version), group)

    def __len__(self) -> int:
        """Return the number of groups that run or wait to be taken."""
        return len(self._entries)

    @property
    def running(self) -> int:
        """Number of groups that have started and not ended."""
        return self._running.total()

    @property
    def ready(self) -> int:
        """Number of finished groups that wait to be taken."""
        return self._ready.total()

    def entries(self) -> Iterator[Entry]:
        """Return an iterator over all entries, in the order in which their groups started."""
        return iter(self._entries.values())

    def due(self, step: int) -> int:
        """Return the number of running groups that would be too old after `step`."""
        oldest = step - self.max_staleness
        return sum(count for version, count in self._running.items() if version <= oldest)

    def can_take(self, sources: Counter[str]) -> bool:
        """Return whether at least `sources[source]` finished groups of each source wait."""
        return all(self._ready[source] >= count for source, count in sources.items())

    def choose(self, schedule: Sequence[str]) -> list[Entry]:
        """Return the oldest waiting groups for `schedule`, which names one source per group.

        The groups stay in the buffer. Their order depends on when they started, not on when they
        ended. Call `can_take` first: there must be enough of them.
        """
        waiting: dict[str, deque[Entry]] = defaultdict(deque)
        for entry in self._entries.values():
            if entry.group is not None:
                waiting[entry.prompt.source].append(entry)
        return [waiting[source].popleft() for source in schedule]

    def expired(self, step: int, *, besides: Sequence[Entry] = ()) -> list[Entry]:
        """Return all groups, except `besides`, that are too old for `step`, running or waiting."""
        spared = {entry.number for entry in besides}
        return [
            entry
            for entry in self._entries.values()
            if step - entry.version > self.max_staleness and entry.number not in spared
        ]
