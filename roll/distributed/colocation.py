"""Who is on the devices now: roles that share devices take turns.

`with colocation.use(Role.ACTOR_TRAIN):` loads the role and first moves off whoever shares a device
with it. A role stays until another one needs its place. Where nobody shares, or memory is not
scarce (CPUs), nothing moves. A role may come in parts, such as the replicas of `actor_infer`: a
part whose devices nobody else needs stays while the others make room. All that move at the same
time move at once. Calls come from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from roll.core.own_thread import all_at_once


@dataclass(frozen=True, slots=True)
class Resident:
    """A role, or a part of one, that holds device memory, and how it comes and goes."""

    devices: frozenset[int]
    onload: Callable[[], object]
    offload: Callable[[], object]
    onload_weights: Callable[[], object] | None = None
    """Brings only what a weight push writes to; `onload` then brings the rest. Only receivers of
    pushes have it."""
    exists: Callable[[], bool] = lambda: True
    """Whether there is anything to move. A part that is lost comes back through `starting`; until
    then its `offload` frees what is left of it."""


@dataclass
class Colocation:
    """Takes turns between the residents of shared devices. Roles are added as they start."""

    enabled: bool
    residents: dict[str, Resident] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    """Residents that are on their devices with all they have."""
    holding_weights: set[str] = field(default_factory=set)
    """Residents that are on their devices with their weights alone."""

    def add(self, role: str, *parts: Resident) -> None:
        """Take on a role that has just started; the next to start finds its devices free."""
        for number, part in enumerate(parts):
            self.residents[part_name(role, number)] = part
            self.loaded.add(part_name(role, number))
        if self.enabled:
            self._clear(self._devices(self.parts(role)), keep=set())

    @contextmanager
    def use(self, role: str) -> Iterator[None]:
        """Have all parts of `role` on their devices inside the block, and nobody else there."""
        if self.enabled:
            parts = self.parts(role)
            self._clear(self._devices(parts), keep=set(parts))
            self._enter(parts)
        yield

    @contextmanager
    def starting(self, part: str) -> Iterator[None]:
        """Have a part's devices free inside the block, in which it starts anew, with all it has."""
        if self.enabled:
            self._clear(self.residents[part].devices, keep=set())
        yield
        self.holding_weights.discard(part)
        self.loaded.add(part)

    def shares(self, part: str) -> bool:
        """Whether others may be on its devices."""
        own = self.residents[part].devices
        others = (other for name, other in self.residents.items() if name != part)
        return self.enabled and any(other.devices & own for other in others)

    @contextmanager
    def push(self, sender: str, receiver: str) -> Iterator[None]:
        """Have `sender` on its devices inside the block, and at least the weights of `receiver`.

        Where the two share devices they fit side by side because the receiver brings its weights
        alone: an engine's caches take most of a GPU.
        """
        if self.enabled:
            sending, receiving = self.parts(sender), self.parts(receiver)
            both = self._devices(sending) | self._devices(receiving)
            self._clear(both, keep={*sending, *receiving})
            if self.loaded.intersection(receiving):
                self._clear(self._devices(sending), keep=set(sending))
            self._enter(sending)
            self._enter_with_weights(receiving)
        yield

    def parts(self, role: str) -> list[str]:
        """Names of the residents that make up a role; or just that part, if it is one."""
        return [name for name in self.residents if name == role or name.startswith(f"{role}/")]

    def _devices(self, parts: list[str]) -> frozenset[int]:
        return frozenset().union(*(self.residents[part].devices for part in parts))

    def _clear(self, devices: frozenset[int], *, keep: set[str]) -> None:
        def leave(part: str) -> None:
            self.residents[part].offload()
            self.loaded.discard(part)
            self.holding_weights.discard(part)

        there = sorted((self.loaded | self.holding_weights) - keep)
        leaving = [part for part in there if self.residents[part].devices & devices]
        all_at_once([partial(leave, part) for part in leaving])

    def _enter(self, parts: list[str]) -> None:
        def enter(part: str) -> None:
            self.residents[part].onload()
            self.holding_weights.discard(part)
            self.loaded.add(part)  # also if lost on its way: `offload` frees what is left

        self._move_in([part for part in parts if part not in self.loaded], enter)

    def _enter_with_weights(self, parts: list[str]) -> None:
        def enter(part: str) -> None:
            onload_weights = self.residents[part].onload_weights
            if onload_weights is None:
                raise ValueError(f"{part} receives weights, so it needs `onload_weights`")
            onload_weights()
            self.holding_weights.add(part)

        there = self.loaded | self.holding_weights
        self._move_in([part for part in parts if part not in there], enter)

    def _move_in(self, parts: list[str], enter: Callable[[str], None]) -> None:
        all_at_once([partial(enter, part) for part in parts if self.residents[part].exists()])


def part_name(role: str, number: int) -> str:
    """Name of one part of a role."""
    return f"{role}/{number}"
