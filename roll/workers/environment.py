"""`EnvWorker`: hosts the environments of many episodes."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import uuid
from array import array
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from roll.config.sections.data import TemplateConfig
from roll.config.sections.environment import EnvironmentConfig
from roll.config.sections.model import ModelConfig
from roll.core.errors import EnvironmentFailedError
from roll.core.threads.mailbox import Mailbox, NoAnswerError
from roll.core.types import WorkerSpec
from roll.data.chat.templates import DatedTokenizer
from roll.data.chat.turns import Turns
from roll.distributed.worker import Worker
from roll.envs.host import EnvHost
from roll.envs.loading import load_agent, load_env
from roll.envs.observed import Observed
from roll.envs.tools.passages import Query
from roll.models.load import load_tokenizer

if TYPE_CHECKING:
    from roll.envs.agents.host import AgentHost


logger = logging.getLogger(__name__)

TAKE_S = 10.0
"""Longest wait of the driver's call for searches, in seconds; then it calls again."""
MEMORY_EVERY_S = 1.0
"""Time between two looks at the memory of a worker, in seconds."""


class EnvWorker(Worker):
    """A worker of `environment`: hosts episodes of one environment on one event loop.

    Args:
        name: name of the environment in the config.
        config: its settings.
        model: model whose chat template and tokenizer render the messages.
        template: settings of the template.
        rendered_at: time that templates treat as the present, in ISO format.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        name: str,
        config: EnvironmentConfig,
        model: ModelConfig,
        template: TemplateConfig,
        rendered_at: str,
    ) -> None:
        super().__init__(spec)
        self.host: EnvHost | AgentHost | None = None
        self._guard: asyncio.Task[None] | None = None
        self._settings = (name, config, model, template, rendered_at)
        self._queries: Mailbox[Query, list[str]] = Mailbox()
        self._process = uuid.uuid4().hex[:8]
        """Name of this worker among all that have its rank: answers for one that died may come."""
        self._numbers = itertools.count()

    async def start(self) -> None:
        """Load the tokenizer and find the environment.

        Raises:
            ConfigError: the environment does not exist, or does not take its arguments.
        """
        name, config, model, template, rendered_at = self._settings
        tokenizer = await asyncio.to_thread(load_tokenizer, model)
        dated = DatedTokenizer(tokenizer, datetime.fromisoformat(rendered_at))
        turns = Turns(dated, template, end_tokens(model, tokenizer))
        if config.agent is not None:
            from roll.envs.agents.host import AgentHost  # aiohttp, which environments do not need

            self.host = AgentHost(
                name, config, load_agent(name, config.agent, config.kwargs), turns
            )
        else:
            self.host = EnvHost(name, config, load_env(name, config), turns, self._search)

        if config.max_memory_gb is not None:
            self._guard = asyncio.ensure_future(self._watch_memory(config.max_memory_gb))

    async def _watch_memory(self, limit_gb: float) -> None:
        """Kill this process when it and its descendants take more than `limit_gb` GiB: what an
        environment leaks, no other call gives back. Never return."""
        while True:
            await asyncio.sleep(MEMORY_EVERY_S)
            used_gb = await asyncio.to_thread(self.memory_gb)
            if used_gb > limit_gb:
                logger.error(
                    "%s takes %.2f GiB, more than max_memory_gb = %g, and is killed",
                    self.spec.name,
                    used_gb,
                    limit_gb,
                )
                os.kill(os.getpid(), signal.SIGKILL)

    async def open(self, episode: str, seed: int, options: Mapping[str, Any]) -> Observed:
        """Begin an episode; see `EnvHost.open`."""
        return await self._host.open(episode, seed, options)

    async def act(
        self,
        episode: str,
        action: str | array[int],
        last: int | None,
        wrote: array[int] | None = None,
    ) -> Observed:
        """Give a turn of the policy to an environment; see `EnvHost.act`."""
        return await self._host.act(episode, action, last, wrote)

    async def end(self, episodes: list[str]) -> None:
        """End episodes; see `EnvHost.close`."""
        await asyncio.gather(*(self._host.close(episode) for episode in episodes))

    async def answer(self) -> None:
        """Return at once: the event loop, on which all time limits are, runs."""

    async def take_queries(self) -> list[Query]:
        """Return the searches in corpora of the run since the last call; wait a while for the
        first."""
        return await self._queries.take(TAKE_S)

    async def bring_passages(self, answers: list[tuple[str, list[str] | str]]) -> None:
        """Pass on what searches found, by the ids of these. A text says why there is nothing."""
        for query_id, found in answers:
            self._queries.give(query_id, found)

    async def _search(self, corpus: str, text: str, count: int) -> list[str]:
        """Search a corpus; see `Search`. The driver knows who has it. This may run on the event
        loop of the environments."""
        query_id = f"{self.spec.name}/{self._process}/{next(self._numbers)}"
        query = Query(query_id, corpus, text, count)
        try:
            return await self._queries.ask(query)
        except NoAnswerError as error:
            raise EnvironmentFailedError(f"search in corpus {corpus!r}: {error}") from None

    async def close(self) -> None:
        """Close all environments."""
        if self._guard is not None:
            self._guard.cancel()
        if self.host is not None:
            await self.host.shut()
        super().close()

    @property
    def _host(self) -> EnvHost | AgentHost:
        """The host of the episodes; ValueError before `start`."""
        if self.host is None:
            raise ValueError(f"{self.spec.name}: call start first")
        return self.host


def end_tokens(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens with which the model may end a turn: those of its tokenizer and of its
    generation config."""
    try:
        listed = GenerationConfig.from_pretrained(model.path).eos_token_id
    except OSError:  # the model has no such file
        listed = None
    several = listed if isinstance(listed, list | tuple) else [listed]
    return frozenset(
        int(token) for token in (*several, tokenizer.eos_token_id) if token is not None
    )
