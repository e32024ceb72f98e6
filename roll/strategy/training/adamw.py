"""Settings of AdamW that the PyTorch backends share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from roll.config.sections.optimizers.kinds import AdamWConfig, OthersConfig


def options(config: AdamWConfig | OthersConfig) -> dict[str, Any]:
    """Return the keyword arguments for `torch.optim.AdamW`, all but the learning rate, which each
    step is given."""
    return {
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "fused": True,
    }


def groups(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Split parameters into a group with weight decay and a group without.

    Matrices decay, by the `weight_decay` of the optimizer. Norms and biases, which have fewer than
    two axes, do not: pulling them to zero only hurts. A group without parameters is left out.
    """
    found: list[dict[str, Any]] = [
        {"params": [p for p in params if p.dim() >= 2]},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    # An adapter has matrices only, and DeepSpeed cannot flatten an empty group.
    return [group for group in found if group["params"]]
