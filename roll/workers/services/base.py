"""`ServiceReward`: base of rewards that ask a service, for samples or for groups."""

from __future__ import annotations

from abc import abstractmethod

from roll.core.types import Sample
from roll.rewards.api import Reward, RewardContext
from roll.rewards.execution.pool import RewardPool
from roll.rewards.execution.runners import LoopRunner
from roll.rewards.loading import BoundReward, Work
from roll.workers.reward import RewardWorker

WIDTH = 4096
"""Number of samples, or groups, that one worker handles at once. Those beyond the limits of the
service wait for their turn."""


class ServiceReward(RewardWorker):
    """A reward whose service has limits of its own."""

    def make_pool(self) -> RewardPool:
        """Make the pool that asks the service. It has no time limit: waiting for a turn at the
        service may take any time, and each try has a limit."""
        bound = BoundReward(self.verdict, is_async=True)
        runner = LoopRunner(self.ctx.name, bound, width=WIDTH, timeout_s=None)
        return RewardPool(self.ctx.name, self.config, runner)

    async def score(self, sample: Sample, ctx: RewardContext) -> Reward:
        """Return the reward of one sample."""
        found = await self.verdict(sample)
        assert isinstance(found, Reward)
        return found

    @abstractmethod
    async def verdict(self, work: Work) -> Reward | list[Reward]:
        """Return the reward of one sample, or the rewards of a group in the order of its samples.

        Args:
            work: a sample, or a list of the samples of one group.

        Raises:
            Exception: the service gave none.
        """
