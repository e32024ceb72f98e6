"""Records of the processes that the watchdog watches: actors, and processes of Ray itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from roll.config.sections.roles import Role
from roll.core.errors import WorkerError, WorkerLostError
from roll.core.types import worker_name
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

    @property
    def name(self) -> str:
        """Role and rank, such as `actor_train[1]`."""
        return f"{worker_name(self.role, self.label)}[{self.rank}]"

    def error(self, message: str) -> WorkerError:
        """Return a new error about its death: a `WorkerLostError` if the worker is replaceable.
        Each waiter needs its own error, because raising it adds a traceback."""
        if self.replaceable:
            return WorkerLostError(message, self.role, self.label, self.rank)
        return WorkerError(message)
