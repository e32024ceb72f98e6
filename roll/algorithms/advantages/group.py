"""Advantages measured against the siblings of one prompt (GRPO, arXiv 2402.03300)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from roll.algorithms.registries import ADVANTAGES
from roll.core.batches import RolloutBatch

StdKind = Literal["group", "batch", "none"]


def group_advantages(rewards_B: Tensor, group_ids_B: Tensor, *, std: StdKind, eps: float) -> Tensor:
    """(reward - mean of its group) / (std + eps), float64 `[B]`.

    The mean includes the sample itself. Standard deviations are unbiased (n - 1): of the group's
    rewards, or of all rewards of the step (`batch`); `none` divides by nothing (Dr.GRPO,
    arXiv 2503.20783). A group of one has nothing to be compared with: its advantage is 0.

    Args:
        rewards_B: any float dtype; computed in float64, so that equal rewards give exactly 0.
        group_ids_B: any integers; siblings need not be neighbours.
        std: what the centred reward is divided by.
        eps: added to the standard deviation.
    """
    rewards_B = rewards_B.double()
    ids, group_B = torch.unique(group_ids_B, return_inverse=True)
    zeros_G = rewards_B.new_zeros(len(ids))
    count_G = zeros_G.index_add(0, group_B, torch.ones_like(rewards_B))
    mean_G = zeros_G.index_add(0, group_B, rewards_B) / count_G
    centred_B = rewards_B - mean_G[group_B]
    match std:
        case "group":
            squares_G = zeros_G.index_add(0, group_B, centred_B.square())
            std_G = (squares_G / (count_G - 1).clamp(min=1)).sqrt()
            return centred_B / (std_G[group_B] + eps)
        case "batch":
            squares = (rewards_B - rewards_B.mean()).square().sum()
            return centred_B / ((squares / max(len(rewards_B) - 1, 1)).sqrt() + eps)
        case "none":
            return centred_B


@ADVANTAGES.register("grpo")
@dataclass(frozen=True, kw_only=True)
class Grpo:
    """The same advantage on every trained token of a sample."""

    std: StdKind = "group"
    eps: float = 1e-6

    def __call__(self, batch: RolloutBatch) -> Tensor:
        """Float32 `[B, T]`, zero outside the loss mask; `batch` is the whole step.

        Raises:
            ValueError: the batch has no rewards.
        """
        rewards_B = batch.require("rewards", made_by="assemble")
        advantages_B = group_advantages(rewards_B, batch.group_ids, std=self.std, eps=self.eps)
        return advantages_B[:, None].float() * batch.loss_mask
