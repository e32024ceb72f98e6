"""Gated delta net of the local layer spec (qwen3_next)."""

from __future__ import annotations

import torch
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from mcore_adapter.modeling.norm import PlainRMSNorm


def delta_net() -> ModuleSpec:
    """Megatron-Core's module, in PyTorch where flash-linear-attention is not installed."""
    if not gated_delta_net.HAVE_FLA:
        _compute_in_torch()
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=PlainRMSNorm, out_proj=RowParallelLinear
        ),
    )


def _compute_in_torch() -> None:
    """Megatron-Core 0.16.1 has the chunked rule in PyTorch, too, for its deterministic mode, but
    refuses to build the module without the package whose kernels it would then not use."""
    gated_delta_net.l2norm = _unit_length
    gated_delta_net.chunk_gated_delta_rule = gated_delta_net.torch_chunk_gated_delta_rule
    gated_delta_net.HAVE_FLA = True


def _unit_length(x: Tensor) -> Tensor:
    """As flash-linear-attention scales queries and keys."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
