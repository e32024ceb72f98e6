"""Who is watched: the actors of a run, and Ray's own processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from roll.config.sections.roles import Role
from roll.core.errors import WorkerError, WorkerLostError
from roll.core.types import worker_name
from roll.distributed.on_ray.host import HostInfo


@dataclass(eq=False, slots=True)
class Daemon:
    """A process of Ray on the driver's machine."""

    name: str
    pid: int
    replaceable: ClassVar[bool] = False
    death: str | None = None

    def error(self, message: str) -> WorkerError:
        return WorkerError(message)


@dataclass(eq=False, slots=True)
class Member:
    """One actor, as it is named in an error, and how it ended."""

    role: Role
    label: str
    rank: int
    replaceable: bool
    info: HostInfo | None = None
    """Known once the actor has answered."""
    death: str | None = None
    """What happened to it."""
    lingers: bool = False
    """It counts as dead, and its process is still there."""

    @property
    def name(self) -> str:
        """Role and rank, like `actor_train[1]`."""
        return f"{worker_name(self.role, self.label)}[{self.rank}]"

    def error(self, message: str) -> WorkerError:
        """A new error each time: many waiters raise one, each with a traceback of its own."""
        if self.replaceable:
            return WorkerLostError(message, self.role, self.label, self.rank)
        return WorkerError(message)
