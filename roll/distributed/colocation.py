"""`Colocation`: lets roles that share devices use them in turn.

`with colocation.use(Role.ACTOR_TRAIN):` moves the roles that share a device with `actor_train` off
their devices, and then moves `actor_train` onto its devices. A role stays on its devices until
another role needs them. Nothing moves if no devices are shared, if memory is not scarce (CPUs), or
if the config lets roles stay beside each other.

A role may consist of parts, such as the replicas of `actor_infer`. A part moves off only if another
role needs its devices. Parts that move in the same call move in parallel. Only one thread at a time
may use a `Colocation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from roll.core.threads.own_thread import run_in_parallel


@dataclass(frozen=True, slots=True)
class Resident:
    """A role, or a part of a role, that holds device memory, with the functions that move it onto
    its devices (`onload`) and off them (`offload`)."""

    devices: frozenset[int]
    """Job-wide numbers of its devices."""
    onload: Callable[[], object]
    offload: Callable[[], object]
    onload_weights: Callable[[], object] | None = None
    """Function that moves only the weights onto the devices, for a weight push; a later `onload`
    moves the rest. None for residents that never receive weights."""
    drop: Callable[[], object] | None = None
    """Function that does what `offload` does, but need not keep the weights, because new ones are
    to come. None for residents that always keep them."""
    free: Callable[[], object] | None = None
    """Function that gives back memory which is reserved on the devices, but not in use, before the
    weights of a push enter beside the part. None for residents that reserve none."""
    exists: Callable[[], bool] = lambda: True
    """Function that tells whether the part can be moved onto its devices. It returns False for a
    part whose worker is lost: that part comes back through `starting`, and until then its `offload`
    frees what is left on the devices."""


@dataclass
class Colocation:
    """Decides which residents are on shared devices. Each role is added when it has started.

    If `enabled` is False, nothing is moved.
    """

    enabled: bool
    beside: bool = False
    """True if residents stay on shared devices beside each other. Nothing is moved then, but what a
    sender of weights has reserved is given back before a push: buckets of the push before are, too,
    and others on the device could not get their memory."""
    residents: dict[str, Resident] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    """Names of the residents that are completely on their devices."""
    holding_weights: set[str] = field(default_factory=set)
    """Names of the residents of which only the weights are on the devices."""

    renewed: str | None = None
    """Role whose weights a push is about to replace; see `renewing`."""

    def add(self, role: str, *parts: Resident) -> None:
        """Add a role that has just started, and move it off its devices, so that the next role
        finds them free when it starts. Its parts get the names `role/0`, `role/1` and so on."""
        for number, part in enumerate(parts):
            self.residents[part_name(role, number)] = part
            self.loaded.add(part_name(role, number))
        if self.enabled:
            self._clear(self._devices(self.parts(role)), keep=set())

    @contextmanager
    def use(self, role: str) -> Iterator[None]:
        """Move all parts of `role` onto their devices, and all other residents off these devices,
        before the block. Nothing moves after it."""
        if self.enabled:
            parts = self.parts(role)
            self._clear(self._devices(parts), keep=set(parts))
            self._enter(parts)
        yield

    @contextmanager
    def starting(self, part: str) -> Iterator[None]:
        """Free the devices of a lost part before the block. The block starts the part again; after
        the block, the part counts as completely on its devices. If the block raises, it does not.

        Args:
            part: name of the part, from `part_name`.
        """
        if self.enabled:
            self._clear(self.residents[part].devices, keep=set())
        yield
        self.holding_weights.discard(part)
        self.loaded.add(part)

    @contextmanager
    def renewing(self, role: str) -> Iterator[None]:
        """Let the parts of `role` that leave their devices inside the block drop their weights.
        After the block, a push must replace the weights of all parts before anything uses them."""
        self.renewed = role
        try:
            yield
        finally:
            self.renewed = None

    def shares(self, part: str) -> bool:
        """Return whether the part takes turns on a device with other residents."""
        own = self.residents[part].devices
        others = (other for name, other in self.residents.items() if name != part)
        return self.enabled and any(other.devices & own for other in others)

    @contextmanager
    def push(self, sender: str, receiver: str) -> Iterator[None]:
        """Move `sender`, and at least the weights of `receiver`, onto their devices, and all other
        residents off these devices, before the block. Nothing moves after it.

        If the two share devices, only the weights of the receiver are moved: both fit then, because
        an engine's caches take most of a GPU.

        Raises:
            ValueError: a part of the receiver has no `onload_weights`.
        """
        if self.enabled:
            sending, receiving = self.parts(sender), self.parts(receiver)
            both = self._devices(sending) | self._devices(receiving)
            self._clear(both, keep={*sending, *receiving})
            if self.loaded.intersection(receiving):
                self._clear(self._devices(sending), keep=set(sending))
            self._enter(sending)
            self._free(sending, receiving)
            self._enter_with_weights(receiving)
        elif self.beside:
            self._free(self.parts(sender), self.parts(receiver))
        yield

    def parts(self, role: str) -> list[str]:
        """Return the names of the residents that make up `role`. If `role` is itself the name of a
        resident, return only that name."""
        return [name for name in self.residents if name == role or name.startswith(f"{role}/")]

    def _free(self, sending: list[str], receiving: list[str]) -> None:
        """Let the senders of a push give back what they have reserved, if receivers share their
        devices."""
        if self._devices(sending) & self._devices(receiving):
            free = [self.residents[part].free for part in sending]
            run_in_parallel([one for one in free if one is not None])

    def _devices(self, parts: list[str]) -> frozenset[int]:
        return frozenset().union(*(self.residents[part].devices for part in parts))

    def _clear(self, devices: frozenset[int], *, keep: set[str]) -> None:
        """Offload, in parallel, all residents on any of `devices` except those in `keep`."""
        renewed = [] if self.renewed is None else self.parts(self.renewed)

        def leave(part: str) -> None:
            resident = self.residents[part]
            drop = resident.drop if part in renewed else None
            (drop or resident.offload)()
            self.loaded.discard(part)
            self.holding_weights.discard(part)

        there = sorted((self.loaded | self.holding_weights) - keep)
        leaving = [part for part in there if self.residents[part].devices & devices]
        run_in_parallel([partial(leave, part) for part in leaving])

    def _enter(self, parts: list[str]) -> None:
        """Move those of the parts that exist and are not completely on their devices there, in
        parallel."""

        def enter(part: str) -> None:
            self.residents[part].onload()
            self.holding_weights.discard(part)
            self.loaded.add(part)  # even if lost meanwhile: `offload` then frees the rest

        self._move_in([part for part in parts if part not in self.loaded], enter)

    def _enter_with_weights(self, parts: list[str]) -> None:
        """Load at least the weights of parts that are not on their devices yet; ValueError for a
        part without `onload_weights`."""

        def enter(part: str) -> None:
            onload_weights = self.residents[part].onload_weights
            if onload_weights is None:
                raise ValueError(f"{part} receives weights, so it needs `onload_weights`")
            onload_weights()
            self.holding_weights.add(part)

        there = self.loaded | self.holding_weights
        self._move_in([part for part in parts if part not in there], enter)

    def _move_in(self, parts: list[str], enter: Callable[[str], None]) -> None:
        """Call `enter`, in parallel, for those parts that exist."""
        run_in_parallel([partial(enter, part) for part in parts if self.residents[part].exists()])


def part_name(role: str, number: int) -> str:
    """Return the name of one part of a role, such as `actor_infer/0`."""
    return f"{role}/{number}"
