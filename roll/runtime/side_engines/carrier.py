"""`Carrier`: takes questions of workers to those who can answer, and brings their answers back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from roll.core.errors import WorkerError, WorkerLostError
from roll.distributed.cluster import Cluster
from roll.rollout.rpc_batching import BatchedCalls

logger = logging.getLogger(__name__)

LOST_PAUSE_S = 0.5
"""Time between two looks whether a lost worker has been replaced, in seconds."""


class _Question(Protocol):
    """Question with an id."""

    @property
    def id(self) -> str: ...


Q = TypeVar("Q", bound=_Question)
A = TypeVar("A")


@dataclass(eq=False)
class Carrier(Generic[Q, A]):
    """Carrier of questions from the workers of one cluster, and of their answers back. All methods
    run on the event loop of the driver."""

    cluster: Cluster[Any]
    """Workers that ask."""
    take: Callable[..., Coroutine[Any, Any, list[Q]]]
    """Method of these workers that returns new questions, and waits a while for the first."""
    bring: Callable[..., Coroutine[Any, Any, None]]
    """Method of these workers that gets pairs of the id of a question and its answer, or why there
    is none."""
    answer: Callable[[Q], Awaitable[A]]
    """Function that answers a question. What it raises becomes the reason why there is none."""
    replaced: bool = False
    """Whether workers that die are replaced; otherwise the death of one ends the run."""
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
        answers: BatchedCalls[tuple[str, A | str], None] = BatchedCalls(partial(self._bring, rank))
        while True:
            try:
                questions = await self.cluster.ask(rank, self.take)
            except WorkerLostError:
                if not self.replaced:
                    raise
                await asyncio.sleep(LOST_PAUSE_S)
                continue
            for question in questions:
                self._spawn(self._answer(question, answers.ask))

    async def _answer(
        self, question: Q, bring: Callable[[list[tuple[str, A | str]]], Awaitable[Any]]
    ) -> None:
        """Answer a question, and bring the answer, or why there is none."""
        told: A | str
        try:
            told = await self.answer(question)
        except Exception as error:  # noqa: BLE001 - of this question; the asker counts it
            told = f"{type(error).__name__}: {error}"
        await bring([(question.id, told)])

    async def _bring(self, rank: int, answers: list[tuple[str, A | str]]) -> list[None]:
        """Bring answers to the worker of this rank; return None for each."""
        await self.cluster.ask(rank, self.bring, answers)
        return [None] * len(answers)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task that `close` stops."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Log the error of a task, for which nobody waits. A dead worker ends the run by itself, or
        is replaced."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            level = logging.DEBUG if isinstance(error, WorkerError) else logging.ERROR
            logger.log(level, "questions of %s: %s", self.cluster.name, error, exc_info=error)
