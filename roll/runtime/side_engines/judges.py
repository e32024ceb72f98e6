"""Judges on devices of the run: their engines, and the way of questions and answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from roll.config.rlvr_base import RlvrBase
from roll.config.sections.roles import Role
from roll.core.completion import Completion
from roll.core.errors import WorkerError
from roll.core.metrics import Metrics
from roll.core.threads.fair_lock import FairLock
from roll.core.types import GenerateRequest
from roll.distributed.cluster import Cluster, Placement
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.routing import LeastLoaded
from roll.rollout.rpc_batching import BatchedCalls
from roll.runtime.inference_service import InferenceService
from roll.runtime.reward_router import RewardCluster
from roll.runtime.side_engines.start import SideEngines, resident_name
from roll.workers.services.judge import JudgeReward

logger = logging.getLogger(__name__)

Told = tuple[str, Completion | str]
"""Id of a question, and its answer or why there is none."""


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
    _carriers: list[tuple[InferenceService, Carrier]] = field(default_factory=list, init=False)

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
            carrier = Carrier(hosted.cluster, service.fleet, judge.request_timeout_s)
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


@dataclass(eq=False)
class Carrier:
    """Carrier of questions from the workers of one reward to the engines of a judge, and of their
    answers back. All methods run on the event loop of the fleet."""

    cluster: Cluster[Any]
    """Workers of the reward, each a `JudgeReward`."""
    fleet: Fleet
    timeout_s: float
    """Time without progress of an engine after which a question fails, in seconds."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    async def start(self) -> None:
        """Begin to carry questions of each worker."""
        for rank in range(self.cluster.world_size):
            self._spawn(self._carry(rank))

    async def close(self) -> None:
        """Stop; questions under way are given up."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry(self, rank: int) -> None:
        """Take the questions of one worker, for ever; each is answered by itself."""
        answers: BatchedCalls[Told, None] = BatchedCalls(partial(self._bring, rank))
        while True:
            for question in await self.cluster.ask(rank, JudgeReward.take_questions):
                self._spawn(self._answer(question, answers.ask))

    async def _answer(
        self, question: GenerateRequest, bring: Callable[[list[Told]], Awaitable[Any]]
    ) -> None:
        """Let the engines answer a question, and bring the answer, or why there is none."""
        told: Completion | str
        try:
            [told] = await self.fleet.generate(
                question, session=question.id, timeout_s=self.timeout_s
            )
        except Exception as error:  # noqa: BLE001 - a failure of this question, which the reward counts
            told = f"{type(error).__name__}: {error}"
        await bring([(question.id, told)])

    async def _bring(self, rank: int, answers: list[Told]) -> list[None]:
        """Bring answers to the reward worker of this rank; return None for each."""
        await self.cluster.ask(rank, JudgeReward.bring_answers, answers)
        return [None] * len(answers)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task that `close` stops."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Log the error of a task, for which nobody waits. A dead reward worker ends the run by
        itself."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            level = logging.DEBUG if isinstance(error, WorkerError) else logging.ERROR
            logger.log(level, "questions to a judge: %s", error, exc_info=error)
