"""Device meshes and process groups of an FSDP2 layout.

The axes of the ranks are, from the slowest to the fastest: copies of the model, shards, tensor
parallel or expert parallel ranks. The ranks that share rows are consecutive too; among them the
axes are: slices of sequence parallelism, tensor parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from roll.config.sections.strategy import Fsdp2Config
from roll.core.errors import ConfigError
from roll.core.types import RankInfo, WorkerSpec
from roll.strategy.training.sequence_shards import SequenceShards

COPIES, SHARD, TP, EP = "copies", "shard", "tp", "ep"
"""Names of the axes of the meshes."""


@dataclass(frozen=True, slots=True)
class Meshes:
    """Meshes and groups of ranks that this rank belongs to."""

    info: RankInfo
    shard: DeviceMesh
    """Mesh `[shard]` or `[copies, shard]` of the parameters that neither tensor parallelism nor
    expert parallelism cuts. All ranks are in this mesh."""
    shard_cut: DeviceMesh
    """Mesh, with the axes of `shard`, of the parameters that are cut. The ranks in this mesh have
    the same part of matrices, or the same experts."""
    tp: DeviceMesh | None
    """Mesh `[tp]` of the ranks that share matrices; None without tensor parallelism."""
    ep: DeviceMesh | None
    """Mesh `[ep]` of the ranks that share experts; None without expert parallelism, which does not
    go with tensor parallelism."""
    shards: SequenceShards | None
    """Ranks that share rows; None where each has its own."""


def make(config: Fsdp2Config, spec: WorkerSpec, device: torch.device) -> Meshes:
    """Divide the ranks of the default process group into meshes. Collective.

    Raises:
        ConfigError: the number of ranks is not divisible by the sizes in the config.
    """
    world, replicas, sharers = spec.world_size, config.replicas, config.ranks_per_part
    for size, what in config.sizes:
        if world % size:
            raise ConfigError(
                f"kind: fsdp2: {what} = {size} does not divide the {world} ranks; give the pool a "
                f"multiple of {size} devices or lower the sizes"
            )
    copies = {COPIES: replicas} if replicas > 1 else {}
    shard = _mesh(device, **copies, **{SHARD: world // replicas})
    shard_cut, cutting = shard, dict[str, DeviceMesh]()
    for axis, size in ((TP, config.tp), (EP, config.ep)):
        if size > 1:
            cut = _mesh(device, **copies, **{SHARD: world // replicas // size, axis: size})
            shard_cut, cutting[axis] = cut[(*copies, SHARD)], cut[axis]
    return Meshes(
        info=RankInfo(
            rank=spec.rank,
            dp_rank=spec.rank // sharers,
            dp_size=world // sharers,
            is_dp_leader=spec.rank % sharers == 0,
        ),
        shard=shard,
        shard_cut=shard_cut,
        tp=cutting.get(TP),
        ep=cutting.get(EP),
        shards=_shards(config, world // sharers, device),
    )


def _shards(config: Fsdp2Config, parts: int, device: torch.device) -> SequenceShards | None:
    """Make the groups of ranks that share rows, by ulysses or tp; None if each has its own rows.

    Collective.

    Args:
        parts: number of such groups, into which a batch is split.
    """
    if config.ranks_per_part == 1:
        return None
    group = _mesh(device, parts=parts, rows=config.ranks_per_part).get_group("rows")
    sequence = None
    if config.ulysses > 1:
        slices = _mesh(device, parts=parts, sequence=config.ulysses, tp=config.tp)
        sequence = slices.get_group("sequence")
    return SequenceShards(group=group, sequence=sequence, tp=config.tp)


def _mesh(device: torch.device, **axes: int) -> DeviceMesh:
    """Make a mesh of all ranks; `axes` maps the name of each axis to its size. Collective."""
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
