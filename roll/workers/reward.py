"""`RewardWorker`: what scores samples. Users subclass it when a reward owns something."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import Any

from roll.config.sections.reward import RewardConfig
from roll.core.errors import ConfigError
from roll.core.metrics import Metrics
from roll.core.types import Sample, WorkerSpec
from roll.distributed.worker import Worker
from roll.rewards.api import Reward, RewardContext
from roll.rewards.execution.counters import Purpose, Scored
from roll.rewards.execution.pool import RewardPool
from roll.rewards.loading import BoundReward

TEARDOWN_TIMEOUT_S = 30.0


class RewardWorker(Worker):
    """A reward that owns something: a model, a connection, a table.

    Subclasses override `setup` (once, with the config's `kwargs`), `score` (once per sample, plain
    or async) and, if need be, `teardown`. Concurrency, timeouts and failure budget are the
    framework's. Named in the config as `worker: my_module:MyReward`.
    """

    def __init__(self, spec: WorkerSpec, name: str, config: RewardConfig) -> None:
        super().__init__(spec)
        self.config = config
        self.ctx = RewardContext(name=name, seed=spec.seed)
        self._pool: RewardPool | None = None

    async def setup(self, ctx: RewardContext, *args: Any, **kwargs: Any) -> None:
        """Acquire what the reward needs; runs once, before the first sample.

        A subclass names the `kwargs` that it takes: for a type checker, `*args` beside `**kwargs`
        stands for any parameters.
        """
        if args or kwargs:
            raise ConfigError(
                f"rewards.{ctx.name}.kwargs: {type(self).__name__}.setup takes none of "
                f"{', '.join([*map(str, args), *kwargs])}"
            )

    def score(
        self, sample: Sample, ctx: RewardContext
    ) -> Reward | float | Awaitable[Reward | float]:
        """The verdict on one sample. Declare it `async def` or plain; plain ones run in threads."""
        raise TypeError(f"{type(self).__name__} must define `score(self, sample, ctx)`")

    async def teardown(self) -> None:
        """Release what `setup` acquired."""

    def make_pool(self) -> RewardPool:
        """Where the samples are scored; not for users to override."""
        bound = BoundReward(
            lambda sample: self.score(sample, self.ctx),
            is_async=inspect.iscoroutinefunction(self.score),
        )
        return RewardPool.from_bound(self.ctx.name, self.config, bound)

    @property
    def pool(self) -> RewardPool:
        if self._pool is None:
            raise ValueError(f"reward {self.ctx.name!r}: call start first")
        return self._pool

    async def start(self) -> None:
        """Set up; called once by the pipeline."""
        pool = self.make_pool()
        # An `async` score runs on a loop of its own, and so must what it works with.
        await pool.host(lambda: self.setup(self.ctx, **self.config.kwargs))
        self._pool = pool

    async def begin_step(self, expected_samples: int, purpose: Purpose = Purpose.TRAINING) -> None:
        """A new failure budget, for about this many samples."""
        self.pool.begin_step(expected_samples, purpose)

    async def score_samples(
        self, samples: list[Sample], purpose: Purpose = Purpose.TRAINING
    ) -> list[Scored]:
        return await self.pool.score(samples, purpose)

    async def take_metrics(self, purpose: Purpose = Purpose.TRAINING) -> Metrics:
        return self.pool.take_metrics(purpose)

    async def close(self) -> None:
        """Tear down what `start` set up."""
        if self._pool is not None:
            try:
                await self._pool.host(self.teardown, timeout_s=TEARDOWN_TIMEOUT_S)
            finally:
                self._pool.close()
        super().close()


class FunctionReward(RewardWorker):
    """Hosts a plain reward function (`fn` in the config)."""

    async def setup(self, ctx: RewardContext, **kwargs: Any) -> None:
        """Nothing to own: the pool binds `kwargs` to the function."""

    def make_pool(self) -> RewardPool:
        return RewardPool.from_config(self.ctx.name, self.config, seed=self.ctx.seed)
