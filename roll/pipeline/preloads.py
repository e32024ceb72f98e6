"""What the fork server of a run imports: what its workers need that takes long. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from roll.config.run import RunConfig
from roll.config.training import InferRole
from roll.distributed.fork_server import ForkServer, can_fork
from roll.platform.machine import count_gpus

SHARED = ("roll.algorithms.compose", "roll.models.load", "roll.weight_sync.transfer")
ENGINES = {"hf": "roll.strategy.hf.engine"}
LEARNERS = {
    "hf": "roll.strategy.hf.score",
    "fsdp2": "roll.strategy.fsdp2.train",
    "deepspeed": "roll.strategy.deepspeed.train",
    "megatron": "roll.strategy.megatron.train",
}
"""Kind of a strategy -> its module. Other engines have processes of their own, which fork nothing
that has imported torch."""


def preloads(config: RunConfig) -> list[str]:
    """Return the names of the modules."""
    found = dict.fromkeys(SHARED)
    for role in config.roles.values():
        modules = ENGINES if isinstance(role, InferRole) else LEARNERS
        if (module := modules.get(role.strategy.kind)) is not None:
            found[module] = None
    return list(found)


@contextmanager
def forking(config: RunConfig) -> Iterator[ForkServer | None]:
    """Start the fork server of a run, where its workers can be forks; it ends with the block."""
    cluster = config.cluster
    here = cluster.nodes == 1 and not (cluster.address or os.environ.get("RAY_ADDRESS"))
    on_cpu = cluster.platform != "cuda" and not (cluster.platform == "auto" and count_gpus())
    if not (here and on_cpu and can_fork()):
        yield None
        return
    with ForkServer(preloads(config)) as server:
        yield server
