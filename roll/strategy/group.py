"""The default process group, which the strategies of a process share."""

from __future__ import annotations

import torch.distributed as dist

from roll.core.types import WorkerSpec
from roll.platform import get_platform

TIMEOUT_S = 1800.0
"""For one collective, the wait for a slower rank included; dead workers are noticed sooner."""


class Membership:
    """The first strategy of a process joins at `spec.rendezvous`, and is the one that leaves."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._platform = get_platform(spec.platform)
        self._joined_here = not dist.is_initialized()
        if self._joined_here:
            self._platform.init_process_group(spec, timeout_s=TIMEOUT_S)
        self.device = self._platform.device(spec)

    def leave(self) -> None:
        if self._joined_here:
            self._platform.destroy()
            self._joined_here = False
