"""`SideEngines`: start of engines beside those of the policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from roll.config.rlvr_base import RlvrBase
from roll.config.sections.model import ModelConfig
from roll.config.sections.placement import parse_devices
from roll.config.sections.roles import Role
from roll.config.sections.rollout import HealthConfig
from roll.config.sections.training import InferRole
from roll.core.threads.loop_thread import LoopThread
from roll.distributed.cluster import Launcher, Placement
from roll.distributed.colocation import Colocation
from roll.rollout.fleet.routing import RoutingPolicy
from roll.runtime.replicas import Replicas, devices_of_replicas, start_replicas


def devices_of(config: RlvrBase, pools: Iterable[str]) -> frozenset[int]:
    """Return the devices of these pools together."""
    return frozenset(device for pool in pools for device in parse_devices(config.pools[pool]))


def resident_name(kind: str, name: str) -> str:
    """Return the name of engines among the residents of devices. They work while the policy's
    engines generate, so they are a part of these: they move onto and off their devices together,
    and a role that trains there moves them off.

    Args:
        kind: section of the config, such as `judges`.
        name: name of the engines there.
    """
    return f"{Role.ACTOR_INFER}/{kind}.{name}"


@dataclass(frozen=True)
class SideEngines:
    """Start of the engines of one role after another."""

    config: RlvrBase
    launcher: Launcher
    loop: LoopThread
    colocation: Colocation

    def start(
        self,
        place: Placement,
        engine: InferRole,
        model: ModelConfig,
        max_tokens: int,
        *,
        resident: str,
        health: HealthConfig,
        routing: RoutingPolicy,
        takes_weights: bool = False,
    ) -> Replicas:
        """Start the engines of a role, and wait until they have loaded their model.

        Args:
            place: their pool and name.
            engine: settings of each.
            model: its model.
            max_tokens: largest number of tokens of a request and its answer.
            resident: name among the residents of devices.
            health: rules for replacing engines.
            routing: choice of the engine for a request.
            takes_weights: whether the policy's weights are pushed to them.
        """
        replicas = start_replicas(
            self.launcher,
            self.loop,
            place,
            engine,
            model,
            max_tokens,
            health=health,
            routing=routing,
            start_timeout_s=self.config.cluster.start_timeout_s,
        )
        devices = devices_of_replicas(self.config.pools[engine.pool], engine.devices_per_worker)
        residents = replicas.residents(devices)
        if not takes_weights:  # a push goes to others
            residents = [replace(one, onload_weights=lambda: None) for one in residents]
        self.colocation.add(resident, *residents)
        return replicas
