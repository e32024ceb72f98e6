"""Who is on the devices now: roles that share devices take turns.

`with colocation.use(Role.ACTOR_TRAIN):` loads the role and first moves off whoever shares a device
with it. A role stays until another one needs its place. Where nobody shares, or memory is not
scarce (CPUs), nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Resident:
    """A role that holds device memory, and how it comes and goes."""

    devices: frozenset[int]
    onload: Callable[[], object]
    offload: Callable[[], object]
    onload_weights: Callable[[], object] | None = None
    """Brings only what a weight push writes to; `onload` then brings the rest. Only receivers of
    pushes have it."""


@dataclass
class Colocation:
    """Takes turns between the residents of shared devices. Roles are added as they start."""

    enabled: bool
    residents: dict[str, Resident] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    """Roles that are on their devices with all they have."""
    holding_weights: set[str] = field(default_factory=set)
    """Roles that are on their devices with their weights alone."""

    def add(self, role: str, resident: Resident) -> None:
        """Take on a role that has just started; the next to start finds its devices free."""
        self.residents[role] = resident
        self.loaded.add(role)
        if self.enabled:
            self._clear(resident.devices, keep=set())

    @contextmanager
    def use(self, role: str) -> Iterator[None]:
        """Have `role` on its devices inside the block, and nobody else."""
        if self.enabled:
            self._clear(self.residents[role].devices, keep={role})
            self._enter(role)
        yield

    @contextmanager
    def push(self, sender: str, receiver: str) -> Iterator[None]:
        """Have `sender` on its devices inside the block, and at least the weights of `receiver`.

        Where the two share devices they fit side by side because the receiver brings its weights
        alone: an engine's caches take most of a GPU.
        """
        if self.enabled:
            sending, receiving = self.residents[sender], self.residents[receiver]
            self._clear(sending.devices | receiving.devices, keep={sender, receiver})
            if receiver in self.loaded:
                self._clear(sending.devices, keep={sender})
            self._enter(sender)
            if receiver not in self.loaded | self.holding_weights:
                self._enter_with_weights(receiver)
        yield

    def _clear(self, devices: frozenset[int], *, keep: set[str]) -> None:
        for role in sorted((self.loaded | self.holding_weights) - keep):
            if self.residents[role].devices & devices:
                self.residents[role].offload()
                self.loaded.discard(role)
                self.holding_weights.discard(role)

    def _enter(self, role: str) -> None:
        if role not in self.loaded:
            self.residents[role].onload()
            self.holding_weights.discard(role)
            self.loaded.add(role)

    def _enter_with_weights(self, role: str) -> None:
        onload_weights = self.residents[role].onload_weights
        if onload_weights is None:
            raise ValueError(f"{role} receives weights, so it needs `onload_weights`")
        onload_weights()
        self.holding_weights.add(role)
