"""The default process group, which the strategies of a process share."""

from __future__ import annotations

import threading
import weakref

import torch.distributed as dist

from roll.core.types import WorkerSpec
from roll.platform import get_platform

TIMEOUT_S = 1800.0
"""For one collective, the wait for a slower rank included; dead workers are noticed sooner."""

_LOCK = threading.Lock()
_inside: weakref.WeakSet[GroupMembership] = weakref.WeakSet()
"""Those that use the default group which one of them has joined; one that was thrown away without
`leave` does not keep the others in it."""


class GroupMembership:
    """A strategy's use of the group: the first of a process joins it at `spec.rendezvous`, and it
    is left by the last one.

    Roles that share a process come and go in any order. A group that was joined elsewhere is
    used, and not left.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._platform = get_platform(spec.platform)
        with _LOCK:
            if not dist.is_initialized():
                _inside.clear()  # nobody's group is left
                self._platform.init_process_group(spec, timeout_s=TIMEOUT_S)
                _inside.add(self)
            elif _inside:
                _inside.add(self)
        self.device = self._platform.device(spec)

    def leave(self) -> None:
        """Use the group no more; a second call does nothing."""
        with _LOCK:
            if self in _inside:
                _inside.remove(self)
                if not _inside:
                    self._platform.destroy()
