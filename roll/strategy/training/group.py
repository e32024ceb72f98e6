"""Membership in the default process group, which the strategies of a process share."""

from __future__ import annotations

import threading
import weakref

import torch.distributed as dist

from roll.core.types import WorkerSpec
from roll.platform import get_platform

TIMEOUT_S = 1800.0
"""Time limit of one collective in seconds, including the wait for slower ranks. The death of a
worker is noticed earlier by other means."""

_LOCK = threading.Lock()
_inside: weakref.WeakSet[GroupMembership] = weakref.WeakSet()
"""Current memberships in a default process group that one of them initialized. References are weak,
so an object deleted without `leave` does not keep the process in the group."""


class GroupMembership:
    """Membership of one strategy in the default process group.

    The first membership in a process initializes the group at `spec.rendezvous`; the last one to
    leave destroys the group. Roles that share a process may join and leave in any order. A group
    that other code initialized is used, but never destroyed.

    Making one is collective if it initializes the group; the errors are then those of
    `Platform.init_process_group`.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._platform = get_platform(spec.platform)
        with _LOCK:
            if not dist.is_initialized():
                _inside.clear()  # their group was destroyed
                self._platform.init_process_group(spec, timeout_s=TIMEOUT_S)
                _inside.add(self)
            elif _inside:
                _inside.add(self)
        self.device = self._platform.device()

    def leave(self) -> None:
        """End this membership and, if it is the last, the group. A second call does nothing."""
        with _LOCK:
            if self in _inside:
                _inside.remove(self)
                if not _inside:
                    self._platform.destroy()
