"""`RewardWorker`: scores samples. Users write a subclass for a reward that holds resources."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from typing import Any

from roll.config.sections.model import ModelConfig
from roll.config.sections.reward import RewardConfig
from roll.core.errors import ConfigError
from roll.core.metrics import Metrics
from roll.core.pickling import Columns
from roll.core.types import Sample, WorkerSpec
from roll.distributed.remote_contents import are_here, fetch_samples
from roll.distributed.worker import Worker
from roll.rewards.api import Reward, RewardContext
from roll.rewards.execution.counters import Purpose, Scored
from roll.rewards.execution.pool import RewardPool
from roll.rewards.loading import BoundReward

TEARDOWN_TIMEOUT_S = 30.0


class RewardWorker(Worker):
    """A reward that holds resources: a model, a connection, a table.

    A subclass overrides `setup` (called once, with the `kwargs` of the config), `score` (called
    once per sample, plain or async) and, if necessary, `teardown`. The framework handles
    concurrency, time limits and the error budget. The config names the subclass:
    `worker: my_module:MyReward`.

    Args:
        name: name of the reward in the config.
        config: its settings.
    """

    def __init__(self, spec: WorkerSpec, name: str, config: RewardConfig) -> None:
        super().__init__(spec)
        self.config = config
        self.ctx = RewardContext(name=name, seed=spec.seed)
        self._pool: RewardPool | None = None

    async def setup(self, ctx: RewardContext, *args: Any, **kwargs: Any) -> None:
        """Acquire the resources of the reward. Called once, before the first sample.

        A subclass declares the `kwargs` that it accepts as parameters. For a type checker, `*args`
        together with `**kwargs` here allows a subclass any parameters.

        Raises:
            ConfigError: the config has `kwargs`, but the subclass does not override this method.
        """
        if args or kwargs:
            raise ConfigError(
                f"rewards.{ctx.name}.kwargs: {type(self).__name__}.setup takes none of "
                f"{', '.join([*map(str, args), *kwargs])}"
            )

    def score(
        self, sample: Sample, ctx: RewardContext
    ) -> Reward | float | Awaitable[Reward | float]:
        """Return the reward of one sample. A subclass declares this method with `async def` or
        `def`; a method declared with `def` runs in threads."""
        raise TypeError(f"{type(self).__name__} must define `score(self, sample, ctx)`")

    async def teardown(self) -> None:
        """Release the resources that `setup` acquired."""

    def make_pool(self) -> RewardPool:
        """Make the pool that calls `score`. Subclasses of users should not override this method."""
        bound = BoundReward(
            lambda sample: self.score(sample, self.ctx),
            is_async=inspect.iscoroutinefunction(self.score),
        )
        return RewardPool.from_bound(self.ctx.name, self.config, bound)

    @property
    def pool(self) -> RewardPool:
        """The pool that calls `score`; ValueError before `start`."""
        if self._pool is None:
            raise ValueError(f"reward {self.ctx.name!r}: call start first")
        return self._pool

    async def start(self) -> None:
        """Make the pool and run `setup` in it. The pipeline calls this once."""
        pool = self.make_pool()
        # An `async` score runs on a loop of the pool, so what `setup` makes must belong to it.
        await pool.host(lambda: self.setup(self.ctx, **self.config.kwargs))
        self._pool = pool

    async def use_tokenizer(self, model: ModelConfig) -> None:
        """Load the policy's tokenizer, which finds the tokens at which steps end. ValueError before
        `start`."""
        # Here: most rewards need no tokenizer, and its library takes seconds to load.
        from roll.models.load import load_tokenizer
        from roll.rewards.decoding import make_decode

        self.pool.decode = make_decode(await asyncio.to_thread(load_tokenizer, model))

    async def begin_step(self, expected_samples: int, purpose: Purpose = Purpose.TRAINING) -> None:
        """Open a new error budget, for a step of about `expected_samples` samples."""
        self.pool.begin_step(expected_samples, purpose)

    async def score_samples(
        self, samples: list[Sample], purpose: Purpose = Purpose.TRAINING
    ) -> list[Scored]:
        """Score samples, in order; see `RewardPool.score`."""
        return Columns(await self.pool.score(await fetched(samples), purpose))

    async def score_groups(
        self, groups: list[list[Sample]], purpose: Purpose = Purpose.TRAINING
    ) -> list[list[Scored]]:
        """Score groups, in order; see `RewardPool.score_groups`."""
        found = await self.pool.score_groups([await fetched(one) for one in groups], purpose)
        return [Columns(scored) for scored in found]

    async def take_metrics(self, purpose: Purpose = Purpose.TRAINING) -> Metrics:
        """Return the metrics of the samples of `purpose` since the last call."""
        return self.pool.take_metrics(purpose)

    async def close(self) -> None:
        """Run `teardown` and end the pool; do nothing before `start`."""
        if self._pool is not None:
            try:
                await self._pool.host(self.teardown, timeout_s=TEARDOWN_TIMEOUT_S)
            finally:
                self._pool.close()
        super().close()


async def fetched(samples: list[Sample]) -> list[Sample]:
    """Return the samples with their tokens and texts, which may be in the object store."""
    return samples if are_here(samples) else await asyncio.to_thread(fetch_samples, samples)


class FunctionReward(RewardWorker):
    """A reward that is a plain function (`fn` in the config)."""

    async def setup(self, ctx: RewardContext, **kwargs: Any) -> None:
        """Do nothing: there are no resources, and the pool passes `kwargs` to the function."""

    def make_pool(self) -> RewardPool:
        return RewardPool.from_config(self.ctx.name, self.config, seed=self.ctx.seed)
