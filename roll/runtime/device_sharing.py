"""Which roles share devices, and the clusters that take turns on them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

from roll.config.run import RunConfig
from roll.config.sections.placement import parse_devices
from roll.config.sections.roles import Role
from roll.distributed.cluster import Cluster
from roll.distributed.colocation import Colocation, Resident
from roll.workers.model import ScoreWorker

M = TypeVar("M", bound=ScoreWorker[Any])


class DeviceSharing:
    """The devices of each role, and whose turn it is.

    Args:
        taking_turns: whether roles that share devices may not be on them at the same time.
        guests: devices of reward models, which work while engines do.
    """

    def __init__(
        self, config: RunConfig, *, taking_turns: bool, guests: frozenset[int] = frozenset()
    ) -> None:
        self.devices = {
            role: frozenset(parse_devices(config.pools[pool]))
            for role, pool in config.role_pools.items()
        }
        together = dict(self.devices)
        if guests:
            # They come and go with the engines, and may be beside them.
            together[Role.ACTOR_INFER] |= guests
        self.colocation = Colocation(enabled=taking_turns and _any_shared(together))

    def share(self, role: str, cluster: Cluster[M]) -> Cluster[M]:
        """The cluster, which from now on leaves its devices when it is another's turn."""
        self.colocation.add(
            role,
            Resident(
                self.devices[role],
                onload=partial(cluster.call, ScoreWorker.onload),
                offload=partial(cluster.call, ScoreWorker.offload),
            ),
        )
        return cluster


def _any_shared(devices: Mapping[str, frozenset[int]]) -> bool:
    return len(frozenset().union(*devices.values())) < sum(map(len, devices.values()))
