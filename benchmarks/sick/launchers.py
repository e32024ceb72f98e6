"""Launchers in this process whose engines have a fault: another temperature, a slow replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Concatenate, cast

from roll.config.sections.roles import Role
from roll.core.completion import Completion
from roll.core.types import GenerateRequest, WorkerSpec
from roll.distributed.cluster import P, Placement, W
from roll.distributed.local import LocalCluster, LocalLauncher
from roll.workers.infer import InferWorker

SLOWER = 4
"""How many times as long the slow replica takes."""


class CoolerEngine(InferWorker):
    """Engine that samples at half the temperature that it is asked for, and reports the log-probs
    of that."""

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        cooler = replace(request.sampling, temperature=request.sampling.temperature / 2)
        return await super().generate(replace(request, sampling=cooler))


class SlowSecond(InferWorker):
    """Engine whose second replica takes several times as long for every request."""

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        answer = await super().generate(request)
        if self.spec.rank == 1:
            await asyncio.sleep((SLOWER - 1) * (loop.time() - begun_s))
        return answer


class FaultyLauncher(LocalLauncher):
    """Launcher in this process that starts engines of another class.

    Args:
        engine: class of the engines.
        replicas: number of them.
    """

    def __init__(self, engine: type[InferWorker] = InferWorker, replicas: int = 1) -> None:
        super().__init__()
        self._engine, self._replicas = engine, replicas

    def start(
        self,
        worker_cls: Callable[Concatenate[WorkerSpec, P], W],
        placement: Placement,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> LocalCluster[W]:
        """See `LocalLauncher.start`."""
        if placement.role is Role.ACTOR_INFER:
            worker_cls = cast(Any, self._engine)
            placement = replace(placement, workers=self._replicas)
        return super().start(worker_cls, placement, *args, **kwargs)
