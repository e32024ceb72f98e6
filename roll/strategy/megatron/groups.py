"""Megatron-Core's process groups, which belong to the process and not to a model."""

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

_cut: ParallelSizes | None = None
"""How the ranks of this process are cut at present."""


def sizes_of(config: MegatronConfig) -> ParallelSizes:
    return ParallelSizes(
        tp=config.tp,
        pp=config.pp,
        vpp=config.vpp,
        ep=config.ep,
        etp=config.etp,
        layers=config.layers,
    )


def join(sizes: ParallelSizes, spec: WorkerSpec) -> bool:
    """Cut the ranks of the default process group; collective.

    Models of one layout share the groups.

    Returns:
        Whether they were cut now, so that the caller has to `leave`.

    Raises:
        ConfigError: the ranks do not divide, or a model of another layout is in this process.
    """
    global _cut
    if _cut is not None:
        if _cut != sizes:
            raise ConfigError(
                f"this process has a Megatron model cut as {_cut} already, another as {sizes} "
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
        init_parallel(sizes, seed=spec.seed, timeout=timedelta(seconds=TIMEOUT_S))
    except McoreAdapterError as error:
        raise ConfigError(f"kind: megatron: {error}") from error
    _cut = sizes
    return True


def leave() -> None:
    """Dissolve the groups that `join` cut."""
    global _cut
    from mcore_adapter.modeling.model import leave_parallel

    leave_parallel()
    _cut = None


def rank_info() -> RankInfo:
    """Tensor parallel ranks and stages of one model get the same rows; the results of the first
    tensor parallel rank of the last stage count."""
    from megatron.core import parallel_state

    return RankInfo(
        rank=dist.get_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        is_dp_leader=(
            parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        ),
    )


def tensor_parallel() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    return group


def from_last_stage(tensor: Tensor) -> Tensor:
    """The last stage's, on every stage; collective."""
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(
            tensor,
            parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return tensor
