"""`SearchWorker`: holds the vectors of a part of a corpus, and searches them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from roll.config.sections.services.corpus import CorpusConfig
from roll.core.errors import WaitTimeoutError
from roll.core.types import WorkerSpec
from roll.distributed.dispatch import BROADCAST, dispatch
from roll.distributed.worker import Worker
from roll.envs.tools.passages import read_passages
from roll.models.encoder import Encoder

SEARCH_S = 600.0
"""Longest time of a search whose encoder is on its device, in seconds."""
Hit = tuple[float, int, str]
"""Cosine, number of the passage in the corpus, and the passage."""


class SearchWorker(Worker):
    """A worker of one of the `corpora`. Rank r of n has every n-th passage, from the one with the
    number r on.

    Args:
        name: name of the corpus in the config.
        config: its settings.
    """

    def __init__(self, spec: WorkerSpec, name: str, config: CorpusConfig) -> None:
        super().__init__(spec)
        self._config = config
        self._here = asyncio.Event()
        """Event that is set while the encoder is on its device."""
        self._turn = asyncio.Lock()
        """Held during a forward pass, and while the encoder moves."""

    async def start(self) -> None:
        """Load the encoder and build the index.

        Raises:
            ConfigError: the corpus or the encoder cannot be read.
        """
        await asyncio.to_thread(self._build)
        self._here.set()

    async def best(self, queries: list[tuple[str, int]]) -> list[list[Hit]]:
        """Return the nearest passages of this part to each query, the nearest first. Wait while the
        encoder is not on its device.

        Args:
            queries: pairs of a text and the number of passages that are wanted.

        Raises:
            WaitTimeoutError: with the encoder on its device, it took longer than `SEARCH_S`.
        """
        while True:
            await self._here.wait()
            # A task of its own: a pass cannot be stopped, and holds the lock for as long as it runs
            searching = asyncio.ensure_future(self._best_if_here(queries))
            await asyncio.wait({searching}, timeout=SEARCH_S)
            if not searching.done():
                raise WaitTimeoutError(
                    f"{self.spec.name}: a search of {len(queries)} queries took longer than "
                    f"{SEARCH_S:g} s; its device may hang"
                )
            found = searching.result()
            if found is not None:
                return found

    async def _best_if_here(self, queries: list[tuple[str, int]]) -> list[list[Hit]] | None:
        """Do what `best` does; return None if the encoder has left its device meanwhile."""
        async with self._turn:
            if not self._here.is_set():
                return None
            return await asyncio.to_thread(self._best, queries)

    @dispatch(BROADCAST)
    async def offload(self) -> None:
        """Move the encoder off its device after the present pass. Searches then wait until
        `onload`."""
        self._here.clear()
        async with self._turn:
            await asyncio.to_thread(self._encoder.move, "cpu")

    @dispatch(BROADCAST)
    async def onload(self) -> None:
        """Move the encoder back to its device; searches that waited go on."""
        async with self._turn:
            await asyncio.to_thread(self._encoder.move, "own")
        self._here.set()

    def _build(self) -> None:
        """Read this worker's passages, and encode them."""
        config, spec = self._config, self.spec
        every = read_passages(Path(config.path), config.text, config.title)
        self._numbers = range(spec.rank, len(every), spec.world_size)
        self._passages = [every[number] for number in self._numbers]
        self._encoder = Encoder(
            config.model,
            pooling=config.pooling,
            max_tokens=config.max_tokens,
            batch=config.batch,
            device=self.platform.device(),
        )
        prefixed = [config.passage_prefix + passage for passage in self._passages]
        self._vectors_ND = self._encoder.encode(prefixed) if prefixed else None

    def _best(self, queries: list[tuple[str, int]]) -> list[list[Hit]]:
        """Do what `best` does."""
        if self._vectors_ND is None:
            return [[] for _ in queries]
        prefix = self._config.query_prefix
        asked_QD = self._encoder.encode([prefix + text for text, _ in queries])
        cosines_QN = asked_QD @ self._vectors_ND.T
        most = min(max(count for _, count in queries), len(self._passages))
        top_QK = torch.topk(cosines_QN, most)
        return [
            [
                (cosine, self._numbers[place], self._passages[place])
                for cosine, place in zip(values[:count], places[:count], strict=True)
            ]
            for (_, count), values, places in zip(
                queries, top_QK.values.tolist(), top_QK.indices.tolist(), strict=True
            )
        ]
