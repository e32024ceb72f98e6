"""Judges on devices of the run, for `roll reward try`: one engine of each, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from roll.config.rlvr_base import RlvrBase
from roll.config.sections.roles import Role
from roll.core.completion import Completion
from roll.core.types import GenerateRequest, WorkerSpec
from roll.platform.machine import cores, count_gpus, free_port
from roll.workers.infer import InferWorker
from roll.workers.reward import RewardWorker
from roll.workers.services.judge import JudgeReward


class OwnJudges:
    """Engines by judge; each starts with the first reward that asks it."""

    def __init__(self, config: RlvrBase) -> None:
        """Start no engine yet; the judges are those of the config on devices of the run."""
        self._config = config
        self._engines: dict[str, InferWorker] = {}
        self._closing = AsyncExitStack()

    async def close(self) -> None:
        """Stop all engines."""
        await self._closing.aclose()

    @asynccontextmanager
    async def answering(self, worker: RewardWorker) -> AsyncIterator[None]:
        """Answer the questions of a reward worker inside the block, if it asks one of these
        judges."""
        judged = worker.config.judge
        if not isinstance(worker, JudgeReward) or judged is None:
            yield
            return
        if judged.by not in self._config.cluster_judges:
            yield
            return
        engine = await self._engine(judged.by)
        answering = asyncio.ensure_future(_answer_all(worker, engine))
        try:
            yield
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def _engine(self, name: str) -> InferWorker:
        """Return the engine of the judge `name`; start it at the first call. The judge must be one
        on devices of the run."""
        if name not in self._engines:
            judge = self._config.cluster_judges[name]
            on_gpus = self._config.cluster.platform != "cpu" and count_gpus() > 0
            spec = WorkerSpec(
                role=Role.JUDGE,
                rank=0,
                world_size=1,
                devices=tuple(range(judge.devices_per_worker)),
                cores=cores(),
                node=0,
                rendezvous=f"127.0.0.1:{free_port()}",
                seed=self._config.seed,
                platform="cuda" if on_gpus else "cpu",
                label=name,
            )
            engine = InferWorker(spec, judge.engine, judge.model, self._config.judge_tokens(name))
            self._closing.push_async_callback(engine.close)
            await engine.start()
            self._engines[name] = engine
        return self._engines[name]


async def _answer_all(worker: JudgeReward, engine: InferWorker) -> None:
    """Answer the questions of a reward worker, for ever."""
    async with asyncio.TaskGroup() as tasks:
        while True:
            for question in await worker.take_questions():
                tasks.create_task(_answer(worker, engine, question))


async def _answer(worker: JudgeReward, engine: InferWorker, question: GenerateRequest) -> None:
    """Let the engine answer a question, and bring the answer, or the error as text, to the
    worker."""
    told: Completion | str
    try:
        [told] = await engine.generate(question)
    except Exception as error:  # noqa: BLE001 - a failure of this question, which the reward counts
        told = f"{type(error).__name__}: {error}"
    await worker.bring_answers([(question.id, told)])
