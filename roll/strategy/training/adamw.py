"""AdamW as the PyTorch backends configure it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from roll.config.sections.training import OptimizerConfig


def options(config: OptimizerConfig) -> dict[str, Any]:
    """Keywords of `torch.optim.AdamW`."""
    return {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "fused": True,
    }


def groups(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Those that decay and those that do not. Decay pulls weights to zero; on norms and biases that
    only hurts."""
    found: list[dict[str, Any]] = [
        {"params": [p for p in params if p.dim() >= 2]},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    # An adapter has matrices only, and DeepSpeed cannot lay a group of nothing end to end.
    return [group for group in found if group["params"]]
