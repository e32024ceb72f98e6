"""Which ranks share what: the process groups of an FSDP2 layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from roll.config.strategy import Fsdp2Config
from roll.core.errors import ConfigError
from roll.core.types import RankInfo, WorkerSpec


@dataclass(frozen=True, slots=True)
class Meshes:
    """Consecutive ranks get the same rows."""

    info: RankInfo
    shard: DeviceMesh
    """Ranks that parameters are sharded over: all; or those of each copy, behind a first axis of
    copies."""
    rows: dist.ProcessGroup | None
    """Ranks that share rows, in the order of their slices; None where a rank has its own."""


def make(config: Fsdp2Config, spec: WorkerSpec, device: torch.device) -> Meshes:
    """Cut the ranks of the default process group; collective.

    Raises:
        ConfigError: their number does not divide.
    """
    sharers, replicas = config.ranks_per_part, config.replicas
    for size, what in ((sharers, "ulysses"), (replicas, "replicas")):
        if spec.world_size % size:
            raise ConfigError(
                f"kind: fsdp2: {what} = {size} does not divide the {spec.world_size} ranks; give "
                f"the pool a multiple of {size} devices or lower it"
            )
    parts = spec.world_size // sharers
    rows = None
    if sharers > 1:
        named = init_device_mesh(device.type, (parts, sharers), mesh_dim_names=("dp", "rows"))
        rows = named.get_group("rows")
    sizes = {"replicas": replicas} if replicas > 1 else {}
    sizes["shard"] = spec.world_size // replicas
    return Meshes(
        info=RankInfo(
            rank=spec.rank,
            dp_rank=spec.rank // sharers,
            dp_size=parts,
            is_dp_leader=spec.rank % sharers == 0,
        ),
        shard=init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)),
        rows=rows,
    )
