"""`ReplayBuffer`: groups from their beginning until they are trained on. Books only, no tasks.

Every group that is begun ends up in exactly one place: taken for a step, rejected, or given back.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from roll.core.types import Prompt
from roll.rollout.types import Group


@dataclass(slots=True)
class Entry:
    """One group that was begun."""

    number: int
    """In the order of beginning, over the whole run."""
    prompt: Prompt
    version: int
    """Of the weights it was begun with; no token of it is of older ones."""
    group: Group | None = None
    """Once it has ended."""


@dataclass
class ReplayBuffer:
    """Hands out whole groups, the oldest first, and none that is older than allowed."""

    max_staleness: int = 0
    _entries: dict[int, Entry] = field(default_factory=dict, init=False, repr=False)
    _next: int = field(default=0, init=False, repr=False)
    _running: Counter[int] = field(default_factory=Counter, init=False, repr=False)
    """Version -> groups begun with it that have not ended; of as many versions as may run at once,
    however long the run."""
    _ready: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    """Source -> groups that wait to be taken."""

    def begin(self, prompt: Prompt, version: int) -> Entry:
        """A group starts to run."""
        entry = Entry(self._next, prompt, version)
        self._next += 1
        self._entries[entry.number] = entry
        self._running[version] += 1
        return entry

    def accept(self, entry: Entry, group: Group) -> None:
        """It has ended, and waits to be taken."""
        entry.group = group
        self._ended(entry)
        self._ready[entry.prompt.source] += 1

    def remove(self, entry: Entry) -> None:
        """It is rejected, or given back."""
        del self._entries[entry.number]
        if entry.group is None:
            self._ended(entry)
        else:
            self._ready[entry.prompt.source] -= 1

    def _ended(self, entry: Entry) -> None:
        self._running[entry.version] -= 1
        if not self._running[entry.version]:
            del self._running[entry.version]

    def keep(self, group: Group, version: int) -> None:
        """A group that an earlier session of the run finished."""
        self.accept(self.begin(group.prompt, version), group)

    def __len__(self) -> int:
        """Groups that run or wait."""
        return len(self._entries)

    @property
    def running(self) -> int:
        return self._running.total()

    @property
    def ready(self) -> int:
        return self._ready.total()

    def entries(self) -> Iterator[Entry]:
        """All, in the order of beginning."""
        return iter(self._entries.values())

    def due(self, step: int) -> int:
        """How many run that can be trained on at `step`, and at no later one."""
        oldest = step - self.max_staleness
        return sum(count for version, count in self._running.items() if version <= oldest)

    def can_take(self, sources: Counter[str]) -> bool:
        """Whether as many groups of each source wait."""
        return all(self._ready[source] >= count for source, count in sources.items())

    def choose(self, schedule: Sequence[str]) -> list[Entry]:
        """The oldest groups that wait, one for each place of the schedule, which names sources.

        Which group ended first plays no role in the order.
        """
        waiting: dict[str, deque[Entry]] = defaultdict(deque)
        for entry in self._entries.values():
            if entry.group is not None:
                waiting[entry.prompt.source].append(entry)
        return [waiting[source].popleft() for source in schedule]

    def expired(self, step: int, *, besides: Sequence[Entry] = ()) -> list[Entry]:
        """Those too old to be trained on at `step`, running or waiting."""
        spared = {entry.number for entry in besides}
        return [
            entry
            for entry in self._entries.values()
            if step - entry.version > self.max_staleness and entry.number not in spared
        ]
