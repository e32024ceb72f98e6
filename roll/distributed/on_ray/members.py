"""Records of the processes that the watchdog watches: actors, and processes of Ray itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from roll.config.sections.roles import Role
from roll.core.errors import WorkerError, WorkerLostError
from roll.core.types import part_name
from roll.distributed.on_ray.host import HostInfo


@dataclass(eq=False, slots=True)
class Daemon:
    """A process of Ray itself (not of a worker) on the driver's machine."""

    name: str
    pid: int
    replaceable: ClassVar[bool] = False
    death: str | None = None
    """Reason of its death; None while it lives."""

    def error(self, message: str) -> WorkerError:
        """Return a new error about its death."""
        return WorkerError(message)


@dataclass(eq=False, slots=True)
class Member:
    """An actor: its name for messages, its process, and how it died."""

    role: Role
    label: str
    rank: int
    replaceable: bool
    info: HostInfo | None = None
    """Process and node; None until the actor has answered for the first time."""
    death: str | None = None
    """Reason of its death; None while it lives."""
    lingers: bool = False
    """True if it counts as dead but its process still exists, such as a stopped process."""
    part: int = 0
    """Number of its part of a worker that lies on several nodes; see `WorkerSpec.part`."""
    others: list[Member] = field(default_factory=list)
    """The other parts of its worker, which are lost with it."""
    kill: Callable[[], None] | None = None
    """Kills its process at once; called if another part is lost."""

    @property
    def name(self) -> str:
        """Role and rank, such as `actor_train[1]`."""
        return part_name(self.role, self.label, self.rank, self.part)

    @property
    def parts(self) -> list[Member]:
        """All parts of its worker, itself first."""
        return [self, *self.others]

    def error(self, message: str) -> WorkerError:
        """Return a new error about its death: a `WorkerLostError` if the worker is replaceable.
        Each waiter needs its own error, because raising it adds a traceback."""
        if self.replaceable:
            return WorkerLostError(message, self.role, self.label, self.rank)
        return WorkerError(message)
