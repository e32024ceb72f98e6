"""Device sharing: decides whether roles take turns on devices, and adds their clusters."""

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
    """Devices of each role, and the `Colocation` in which roles take turns on them.

    Args:
        taking_turns: True if roles that share devices must not be on them at the same time, unless
            `cluster.colocate` lets them be there beside each other.
        guests: devices of the reward models, judges and opponents, which work while engines
            generate.
    """

    def __init__(
        self, config: RunConfig, *, taking_turns: bool, guests: frozenset[int] = frozenset()
    ) -> None:
        self.devices = {
            role: frozenset(parse_devices(config.pools[pool]))
            for role, pool in config.role_pools.items()
        }
        # They move on and off together with the engines, and may be on the same devices at the same
        # time. So devices that only they share need no turns.
        beside = ("judges.", "opponents.")
        together = {r: own for r, own in self.devices.items() if not r.startswith(beside)}
        if guests:
            together[Role.ACTOR_INFER] |= guests
        stay = config.cluster.colocate == "beside"
        scarce = taking_turns and _any_shared(together)
        self.colocation = Colocation(enabled=scarce and not stay, beside=scarce and stay)

    def share(self, role: str, cluster: Cluster[M]) -> Cluster[M]:
        """Add a cluster that has just started, and return it. From now on the cluster moves off its
        devices when another role needs them. `role` is its key in the config."""
        self.colocation.add(
            role,
            Resident(
                self.devices[role],
                onload=partial(cluster.call, ScoreWorker.onload),
                offload=partial(cluster.call, ScoreWorker.offload),
                free=partial(cluster.call, ScoreWorker.free_cached),
            ),
        )
        return cluster


def _any_shared(devices: Mapping[str, frozenset[int]]) -> bool:
    """Return whether two roles have a device in common; `devices` are those of each role."""
    return len(frozenset().union(*devices.values())) < sum(map(len, devices.values()))
