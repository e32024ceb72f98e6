"""Corpora of a run: workers that search them, and the way of queries from environments."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from roll.config.agentic_base import AgenticBase
from roll.config.sections.placement import parse_devices
from roll.config.sections.roles import Role
from roll.core.errors import EnvironmentFailedError
from roll.distributed.cluster import Cluster, Launcher, Placement
from roll.distributed.colocation import Colocation, Resident
from roll.envs.tools.passages import Query
from roll.rollout.rpc_batching import BatchedCalls
from roll.runtime.side_engines.carrier import Carrier
from roll.runtime.side_engines.start import resident_name
from roll.workers.environment import EnvWorker
from roll.workers.search import SearchWorker


def start_corpora(
    config: AgenticBase, launcher: Launcher, colocation: Colocation
) -> dict[str, Cluster[SearchWorker]]:
    """Start the workers of all corpora, one corpus after another, and build their indexes; return
    them by name.

    Raises:
        ConfigError: a corpus or an encoder cannot be read.
    """
    found = {}
    for name, corpus in config.corpora.items():
        place = Placement(Role.SEARCH, pool=corpus.pool, seed=config.seed, label=name)
        cluster = launcher.start(SearchWorker, place, name, corpus)
        cluster.submit(SearchWorker.start).result(config.cluster.start_timeout_s)
        colocation.add(
            resident_name("corpora", name),
            Resident(
                frozenset(parse_devices(config.pools[corpus.pool])),
                onload=partial(cluster.call, SearchWorker.onload),
                offload=partial(cluster.call, SearchWorker.offload),
                onload_weights=lambda: None,  # a push goes to others
            ),
        )
        found[name] = cluster
    return found


@dataclass(eq=False)
class Corpora:
    """Corpora of a run. The methods run on the event loop of the driver."""

    clusters: Mapping[str, Cluster[SearchWorker]]
    """Name of the corpus -> workers, each with a part of it."""
    _calls: dict[str, BatchedCalls[tuple[str, int], list[str]]] = field(init=False)
    _carriers: list[Carrier[Query, list[str]]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._calls = {
            name: BatchedCalls(partial(search, cluster)) for name, cluster in self.clusters.items()
        }

    async def start(self, environments: Iterable[Cluster[EnvWorker]]) -> None:
        """Begin to carry the queries of these workers; do nothing without a corpus."""
        for cluster in environments if self.clusters else ():
            carrier = Carrier(
                cluster,
                EnvWorker.take_queries,
                EnvWorker.bring_passages,
                self._answer,
                replaced=True,
            )
            await carrier.start()
            self._carriers.append(carrier)

    async def close(self) -> None:
        """Stop to carry queries."""
        for carrier in self._carriers:
            await carrier.close()

    async def _answer(self, query: Query) -> list[str]:
        """Return the passages nearest to a query; EnvironmentFailedError if there is no such
        corpus."""
        if query.corpus not in self._calls:
            known = ", ".join(self._calls)
            raise EnvironmentFailedError(f"no corpus {query.corpus!r} (corpora: {known})")
        [found] = await self._calls[query.corpus].ask([(query.text, query.count)])
        return found


async def search(cluster: Cluster[Any], queries: list[tuple[str, int]]) -> Sequence[list[str]]:
    """Return the passages nearest to each query, the nearest first; of equal ones the first.

    Args:
        cluster: workers of the corpus.
        queries: pairs of a text and the number of passages that are wanted.
    """
    ranks = range(cluster.world_size)
    parts = await asyncio.gather(*(cluster.ask(r, SearchWorker.best, queries) for r in ranks))
    return [
        [
            passage
            for _, _, passage in heapq.nsmallest(
                count, (hit for part in parts for hit in part[i]), key=lambda hit: (-hit[0], hit[1])
            )
        ]
        for i, (_, count) in enumerate(queries)
    ]
