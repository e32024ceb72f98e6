"""Opponents of the policy in environments of several players: engines of their own, with weights
that stay, or with those of the policy at an earlier step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from roll.config.sections.roles import Role
from roll.config.sections.services.opponent import OpponentConfig
from roll.core.metrics import Last, Metrics
from roll.core.threads.fair_lock import FairLock
from roll.distributed.cluster import Placement
from roll.distributed.colocation import Colocation
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.routing import Sticky
from roll.runtime.inference_service import InferenceService
from roll.runtime.replicas import Replicas
from roll.runtime.side_engines.start import SideEngines, resident_name
from roll.runtime.weight_pusher import WeightPusher

SECTION = "opponents"


def start_opponents(
    opponents: Mapping[str, OpponentConfig], engines: SideEngines
) -> dict[str, Replicas]:
    """Start the engines of these opponents, one opponent after another; return them by name."""
    config = engines.config
    return {
        name: engines.start(
            Placement(
                Role.OPPONENT,
                pool=opponent.pool,
                per_worker=opponent.devices_per_worker,
                seed=config.seed,
                label=name,
                replaceable=True,
                env=opponent.env,
            ),
            opponent,
            opponent.model or config.train_model,
            config.max_sequence_tokens,
            resident=resident_name(SECTION, name),
            health=config.rollout.health,
            routing=Sticky(),
            takes_weights=opponent.every is not None,
        )
        for name, opponent in opponents.items()
    }


@dataclass(eq=False)
class Opponents:
    """Opponents of a run."""

    configs: Mapping[str, OpponentConfig]
    services: Mapping[str, InferenceService]
    """Name of the opponent -> its engines."""
    colocation: Colocation
    _given: set[str] = field(default_factory=set, init=False)
    """Names of those that have got weights of the policy."""

    @classmethod
    def of(
        cls,
        configs: Mapping[str, OpponentConfig],
        replicas: Mapping[str, Replicas],
        pusher: WeightPusher | None,
        *,
        trainer_lock: FairLock,
        colocation: Colocation,
    ) -> Self:
        """Connect engines that have started.

        Args:
            configs: opponents by name.
            replicas: engines of each.
            pusher: sender of the policy's weights to its own engines; None if nothing is trained.
            trainer_lock: lock of all that move roles onto devices.
            colocation: devices that roles share.
        """
        services = {
            name: InferenceService(
                own,
                colocation,
                pusher.to(own.infer) if pusher and configs[name].every is not None else None,
                role=resident_name(SECTION, name),
                trainer_lock=trainer_lock,
            )
            for name, own in replicas.items()
        }
        return cls(configs, services, colocation)

    @property
    def fleets(self) -> dict[str, Fleet]:
        """Engines of each opponent, by name."""
        return {name: service.fleet for name, service in self.services.items()}

    def start(self) -> None:
        """Watch the engines, and replace those that are lost."""
        for service in self.services.values():
            service.start()

    def close(self) -> None:
        """Stop to watch the engines."""
        for service in self.services.values():
            service.close()

    def update_weights(self, version: int, *, verify: bool) -> None:
        """Push the trainer's weights to those opponents whose turn it is, and to those that have
        got none yet. Call this method inside `trainer_busy`.

        Args:
            version: version of these weights.
            verify: check the received weights by their checksum.

        Raises:
            RollError: see `InferenceService.update_weights`.
        """
        for name, service in self.services.items():
            every = self.configs[name].every
            if every is None or (name in self._given and version % every):
                continue
            with self.colocation.push(Role.ACTOR_TRAIN, resident_name(SECTION, name)):
                service.update_weights(version, verify=verify)
            self._given.add(name)

    def take_push_metrics(self) -> Metrics:
        """Return the metrics of the pushes to all opponents since the last call."""
        return Metrics.concat([one.take_push_metrics() for one in self.services.values()])

    def take_metrics(self) -> Metrics:
        """Return `opponents/<name>/version` of those that get the policy's weights; and, as counts
        since the last call, `lost_replicas`, `moved_requests` and `moved_tokens` of each."""
        found = Metrics()
        for name, service in self.services.items():
            for key, value in service.fleet.take_metrics().items():
                found |= {f"{SECTION}/{name}/{key.removeprefix('rollout/')}": value}
            if self.configs[name].every is not None:
                found |= {f"{SECTION}/{name}/version": Last(service.fleet.version)}
        return found
