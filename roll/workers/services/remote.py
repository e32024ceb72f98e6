"""`RemoteReward`: asks a server of the user for rewards (`remote` in the config)."""

from __future__ import annotations

from typing import Any

from roll.config.sections.reward import RewardConfig
from roll.core.types import WorkerSpec
from roll.rewards.api import Reward, RewardContext
from roll.rewards.loading import Work
from roll.rewards.remote.scoring import Outcome, RemoteScoring
from roll.rewards.service.client import JsonClient
from roll.rollout.rpc_batching import BatchedCalls
from roll.workers.services.base import ServiceReward


class RemoteReward(ServiceReward):
    """A reward that a server computes, for samples in batches.

    Args:
        name: name of the reward in the config.
        key: key of the user for the server; None if it needs none.
    """

    def __init__(
        self, spec: WorkerSpec, name: str, config: RewardConfig, key: str | None = None
    ) -> None:
        super().__init__(spec, name, config)
        assert config.remote is not None
        self._client = JsonClient(config.remote, key, sharers=config.workers)
        scoring = RemoteScoring(name, config.remote, self._client, config.kwargs)
        self._calls: BatchedCalls[Work, Outcome] = BatchedCalls(scoring.score)

    async def setup(self, ctx: RewardContext, **kwargs: Any) -> None:
        """Open the connections to the server, which gets `kwargs` with each call."""
        await self._client.open()

    async def teardown(self) -> None:
        """Close the connections to the server."""
        await self._client.close()

    async def verdict(self, work: Work) -> Reward | list[Reward]:
        """Ask the server, together with other calls of this moment; see `ServiceReward.verdict`."""
        [found] = await self._calls.ask([work])
        if isinstance(found, Exception):
            raise found
        return found
