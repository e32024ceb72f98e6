"""Modules that the fork server of a run imports because its workers need them and they load slowly.
Importing this file does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from roll.config.run import RunConfig
from roll.config.sections.training import InferRole
from roll.distributed.device_layout import address_to_join
from roll.distributed.processes.fork_server import ForkServer, can_fork
from roll.platform.machine import count_gpus

SHARED = ("roll.algorithms.build", "roll.models.load", "roll.weight_sync.transfer")
ENGINES = {"hf": "roll.strategy.hf.engine"}
LEARNERS = {
    "hf": "roll.strategy.hf.score",
    "fsdp2": "roll.strategy.fsdp2.train",
    "deepspeed": "roll.strategy.deepspeed.train",
    "megatron": "roll.strategy.megatron.train",
}
"""Modules by kind of strategy. An engine that is not listed starts new interpreters."""
ENGINES_APART = {"vllm": "roll.strategy.vllm.preload"}
"""Modules of engines that change other packages when they are imported."""


def preloads(config: RunConfig) -> list[str]:
    """Return the names of the modules that the workers of this run need, but for those of engines
    that are loaded apart."""
    found = dict.fromkeys(SHARED)
    for role in config.roles.values():
        modules = ENGINES if isinstance(role, InferRole) else LEARNERS
        if (module := modules.get(role.strategy.kind)) is not None:
            found[module] = None
    return list(found)


def engine_preloads(config: RunConfig) -> list[str]:
    """Return the names of the modules that workers with an engine need in addition."""
    kinds = [role.strategy.kind for role in config.roles.values() if isinstance(role, InferRole)]
    return [ENGINES_APART[kind] for kind in kinds if kind in ENGINES_APART]


@contextmanager
def forking(config: RunConfig) -> Iterator[ForkServer | None]:
    """Start the fork server of a run, which stops at the end of the block; give None if its workers
    cannot be forks."""
    cluster = config.cluster
    here = cluster.nodes == 1 and address_to_join(cluster) is None
    if not here or cluster.platform == "cuda" or count_gpus() or not can_fork():
        yield None
        return
    engines = engine_preloads(config)
    with ForkServer(preloads(config), engines, overlapping=config.roles_overlap) as server:
        yield server
