"""`RemoteScoring`: asks a server for the rewards of samples, and again for those that it left
out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from roll.config.sections.services.remote import RemoteConfig
from roll.core.types import Sample
from roll.rewards.api import Reward
from roll.rewards.loading import Work
from roll.rewards.remote.contract import RemoteFailure, read_rewards, request_of
from roll.rewards.service.client import (
    FIRST_WAIT_S,
    MAX_WAIT_S,
    JsonClient,
    ServiceError,
)

Outcome = Reward | list[Reward] | Exception
"""Reward of a sample, rewards of a group, or why there are none."""


class RemoteScoring:
    """Client of a server of rewards. All methods run on the event loop of the client."""

    def __init__(
        self, name: str, config: RemoteConfig, client: JsonClient, kwargs: Mapping[str, Any]
    ) -> None:
        """Prepare the client of the reward `name`; `kwargs` are sent with each request."""
        self._name = name
        self._config = config
        self._client = client
        self._kwargs = kwargs

    async def score(self, works: Sequence[Work]) -> list[Outcome]:
        """Return an outcome for each sample, or group, in order. All of them are of one kind."""
        size = self._config.batch_size
        batches = [works[start : start + size] for start in range(0, len(works), size)]
        found = await asyncio.gather(*(self._batch(batch) for batch in batches))
        return [outcome for batch in found for outcome in batch]

    async def _batch(self, works: Sequence[Work]) -> list[Outcome]:
        """Ask until all works have an outcome, at most `tries` times."""
        outcomes: dict[int, Outcome] = {}
        for tried in range(self._config.tries):
            if tried:
                await asyncio.sleep(min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** (tried - 1)))
            lacking = {place: work for place, work in enumerate(works) if place not in outcomes}
            try:
                outcomes |= await self._ask(lacking)
            except ServiceError as error:
                outcomes |= dict.fromkeys(lacking, error)
            if len(outcomes) == len(works):
                break
        none = ServiceError(
            f"{self._config.url}: no reward came for this sample in {self._config.tries} calls"
        )
        return [outcomes.get(place, none) for place in range(len(works))]

    async def _ask(self, works: Mapping[int, Work]) -> dict[int, Outcome]:
        """Ask once; return the outcomes of the works that the answer has completely, by place.

        Raises:
            ServiceError: no answer came, or it has another form than the contract.
        """
        per = "sample" if all(isinstance(work, Sample) for work in works.values()) else "group"
        samples = [sample for work in works.values() for sample in _samples(work)]
        request = request_of(samples, reward=self._name, per=per, kwargs=self._kwargs)
        reply = await self._client.post(self._config.url, request)
        try:
            found = read_rewards(reply.value, samples)
        except ServiceError as error:
            raise ServiceError(f"{self._config.url}: {error}") from None
        return {
            place: _outcome(work, found)
            for place, work in works.items()
            if all(sample.id in found for sample in _samples(work))
        }


def _samples(work: Work) -> Sequence[Sample]:
    return [work] if isinstance(work, Sample) else work


def _outcome(work: Work, found: Mapping[str, Reward | RemoteFailure]) -> Outcome:
    """Return the outcome of one work; a group with a failure has failed."""
    rewards = []
    for sample in _samples(work):
        one = found[sample.id]
        if isinstance(one, RemoteFailure):
            return one
        rewards.append(one)
    return rewards[0] if isinstance(work, Sample) else rewards
