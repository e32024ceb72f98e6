"""Who is on the devices now: roles that share devices take turns.

`with colocation.use(Role.ACTOR_TRAIN):` loads the role and first moves off whoever shares a device
with it. A role stays until another one needs its place. Where memory is not scarce (CPUs) nothing
moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from roll.config.roles import Role


@dataclass(frozen=True, slots=True)
class Resident:
    """A role that holds device memory, and how it comes and goes."""

    devices: frozenset[int]
    onload: Callable[[], object]
    offload: Callable[[], object]


@dataclass
class Colocation:
    """Takes turns between the residents of shared devices."""

    residents: Mapping[Role, Resident]
    enabled: bool
    loaded: set[Role] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.loaded = set(self.residents)  # everybody starts out loaded

    @contextmanager
    def use(self, *roles: Role) -> Iterator[None]:
        """Have all `roles` on their devices inside the block."""
        if self.enabled:
            needed = frozenset().union(*(self.residents[role].devices for role in roles))
            for role in sorted(self.loaded - set(roles)):
                if self.residents[role].devices & needed:
                    self.residents[role].offload()
                    self.loaded.discard(role)
            for role in roles:
                if role not in self.loaded:
                    self.residents[role].onload()
                    self.loaded.add(role)
        yield
