"""Megatron-Core's process groups. They are global to the process, not part of a model."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from mcore_adapter.errors import McoreAdapterError
from mcore_adapter.parallel_sizes import ParallelSizes
from mcore_adapter.platform import adapt_to_cpu
from roll.config.sections.strategy import MegatronConfig
from roll.core.errors import ConfigError
from roll.core.types import RankInfo, WorkerSpec
from roll.strategy.training.group import TIMEOUT_S

_cut: tuple[ParallelSizes, int] | None = None
"""Sizes of the current groups, and how many ranks share rows; None if there are no groups."""


def sizes_of(config: MegatronConfig) -> ParallelSizes:
    """Return the parallel sizes that `config` asks for, as mcore_adapter names them."""
    return ParallelSizes(
        tp=config.tp,
        pp=config.pp,
        vpp=config.vpp,
        ep=config.ep,
        etp=config.etp,
        layers=config.layers,
    )


def join(sizes: ParallelSizes, cp: int, spec: WorkerSpec) -> bool:
    """Divide the ranks of the default process group into Megatron-Core's groups. Collective.

    If the process has groups of the same sizes already, they are shared.

    Args:
        cp: number of ranks that share the tokens of each row.

    Returns:
        True if this call created the groups; the caller must then call `leave` at the end.

    Raises:
        ConfigError: the number of ranks is not divisible by the sizes, this process has groups of
            other sizes, or the machine has a GPU although the platform is `cpu`.
    """
    global _cut
    if _cut is not None:
        if _cut != (sizes, cp):
            raise ConfigError(
                f"this process has a Megatron model cut as {_cut[0]}, cp {_cut[1]}, already; "
                f"another as {sizes}, cp {cp}, "
                "cannot join it; close the first or give them the same sizes"
            )
        return False
    if not adapt_to_cpu() and spec.platform == "cpu":
        raise ConfigError(
            "kind: megatron: this machine has a GPU, which Megatron-Core puts tensors on, but the "
            "platform is cpu; set cluster.platform to cuda or hide the GPU (CUDA_VISIBLE_DEVICES=)"
        )
    from mcore_adapter.modeling.model import init_parallel

    try:
        init_parallel(sizes, cp=cp, seed=spec.seed, timeout=timedelta(seconds=TIMEOUT_S))
    except McoreAdapterError as error:
        raise ConfigError(f"kind: megatron: {error}") from error
    _cut = sizes, cp
    return True


def leave() -> None:
    """Destroy the groups that `join` created."""
    global _cut
    from mcore_adapter.modeling.model import leave_parallel

    leave_parallel()
    _cut = None


def rank_info() -> RankInfo:
    """Return this rank's place in the data parallel layout.

    All tensor and context parallel ranks and pipeline stages of one copy of the model get the same
    rows. Their leader is the first tensor and context parallel rank of the last stage.
    """
    from megatron.core import parallel_state

    return RankInfo(
        rank=dist.get_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        is_dp_leader=(
            parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
            and on_last_stage()
        ),
        has_head=on_last_stage(),
    )


def tensor_parallel() -> dist.ProcessGroup:
    """Return the group of the ranks that share this rank's matrices."""
    from megatron.core import parallel_state

    group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    return group


def context_parallel() -> dist.ProcessGroup:
    """Return the group of the ranks that share the tokens of this rank's rows, in order."""
    from megatron.core import parallel_state

    group: dist.ProcessGroup = parallel_state.get_context_parallel_group()
    return group


def on_last_stage() -> bool:
    """Return whether this rank's stage has the last layers and the head."""
    from megatron.core import parallel_state

    found: bool = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return found


def from_last_stage(tensor: Tensor) -> Tensor:
    """Broadcast a tensor, in place, from the last pipeline stage to all stages. Collective."""
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(
            tensor,
            parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return tensor
