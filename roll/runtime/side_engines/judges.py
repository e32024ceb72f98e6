"""Judges on devices of the run: their engines, and the way of questions and answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.config.rlvr_base import RlvrBase
from roll.config.sections.roles import Role
from roll.core.completion import Completion
from roll.core.metrics import Metrics
from roll.core.threads.fair_lock import FairLock
from roll.core.types import GenerateRequest
from roll.distributed.cluster import Cluster, Placement
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.routing import LeastLoaded
from roll.runtime.inference_service import InferenceService
from roll.runtime.reward_router import RewardCluster
from roll.runtime.side_engines.carrier import Carrier
from roll.runtime.side_engines.start import SideEngines, resident_name
from roll.workers.services.judge import JudgeReward


def start_judges(engines: SideEngines, trainer_lock: FairLock) -> dict[str, InferenceService]:
    """Start the engines of all judges, one judge after another; return them by name.

    Args:
        engines: start of engines.
        trainer_lock: lock of all that move roles onto devices.
    """
    config, services = engines.config, {}
    for name, judge in config.cluster_judges.items():
        place = Placement(
            Role.JUDGE,
            pool=judge.pool,
            per_worker=judge.devices_per_worker,
            seed=config.seed,
            label=name,
            replaceable=True,
            env=judge.env,
        )
        resident = resident_name("judges", name)
        replicas = engines.start(
            place,
            judge.engine,
            judge.model,
            config.judge_tokens(name),
            resident=resident,
            health=judge.health,
            routing=LeastLoaded(),
        )
        services[name] = InferenceService(
            replicas, engines.colocation, pusher=None, role=resident, trainer_lock=trainer_lock
        )
    return services


@dataclass(eq=False)
class Judges:
    """Judges of a run, and what carries questions of reward workers to them."""

    services: Mapping[str, InferenceService]
    """Name of the judge -> its engines."""
    _carriers: list[tuple[InferenceService, Carrier[GenerateRequest, Completion]]] = field(
        default_factory=list, init=False
    )

    def start(self, config: RlvrBase, rewards: Mapping[str, RewardCluster]) -> None:
        """Watch the engines, and begin to carry questions.

        Args:
            config: config of the run.
            rewards: rewards by name.
        """
        for service in self.services.values():
            service.start()
        for hosted in rewards.values():
            judged = hosted.config.judge
            if judged is None or judged.by not in self.services:
                continue
            service, judge = self.services[judged.by], config.cluster_judges[judged.by]
            carrier = judge_carrier(hosted.cluster, service.fleet, judge.request_timeout_s)
            service.run(carrier.start())
            self._carriers.append((service, carrier))

    def close(self) -> None:
        """Stop to carry questions, and to watch the engines."""
        for service, carrier in self._carriers:
            service.run(carrier.close())
        for service in self.services.values():
            service.close()

    def take_metrics(self) -> Metrics:
        """Return `judges/<name>/lost_replicas`, `moved_requests` and `moved_tokens`: counts since
        the last call."""
        return Metrics(
            {
                f"judges/{name}/{key.removeprefix('rollout/')}": value
                for name, service in self.services.items()
                for key, value in service.fleet.take_metrics().items()
            }
        )


def judge_carrier(
    cluster: Cluster[Any], fleet: Fleet, timeout_s: float
) -> Carrier[GenerateRequest, Completion]:
    """Return a carrier of questions to the engines of a judge. A question that fails is aborted on
    its engine.

    Args:
        cluster: workers of the reward, each a `JudgeReward`.
        fleet: engines of the judge.
        timeout_s: time without progress of an engine after which a question fails, in seconds.
    """

    async def answer(question: GenerateRequest) -> Completion:
        [told] = await fleet.generate(question, session=question.id, timeout_s=timeout_s)
        return told

    return Carrier(cluster, JudgeReward.take_questions, JudgeReward.bring_answers, answer)
