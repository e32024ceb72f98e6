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
    """Return the spec of Megatron-Core's gated delta net.

    Where flash-linear-attention is not installed, functions of Megatron-Core are replaced for the
    whole process, so that it computes the net in PyTorch.
    """
    if not gated_delta_net.HAVE_FLA:
        _compute_in_torch()
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=PlainRMSNorm, out_proj=RowParallelLinear
        ),
    )


def _compute_in_torch() -> None:
    """Let Megatron-Core build and run gated delta nets without flash-linear-attention.

    For its deterministic mode, Megatron-Core 0.16.1 also has the chunked delta rule in PyTorch. It
    refuses to build the module without the package all the same, although that mode does not use
    the package's kernels.
    """
    gated_delta_net.l2norm = _unit_length
    gated_delta_net.chunk_gated_delta_rule = gated_delta_net.torch_chunk_gated_delta_rule
    gated_delta_net.HAVE_FLA = True


def _unit_length(x: Tensor) -> Tensor:
    """Scale queries or keys to length one, as flash-linear-attention does."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
