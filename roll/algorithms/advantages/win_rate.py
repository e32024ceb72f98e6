"""Advantages by the rate at which a sample beats the samples of its prompt (arXiv 2405.00675)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.advantages.rewards import total_rewards
from roll.algorithms.loss_interface import SampleEstimator, Samples
from roll.algorithms.registries import ADVANTAGES
from roll.algorithms.siblings import Siblings
from roll.config.algorithm.advantages import WinRateConfig


def win_rates(rewards_B: Tensor, group_ids_B: Tensor, *, scale: float | None = None) -> Tensor:
    """Return for each sample the mean chance to beat the samples of its group, float64 `[B]`.

    The sample itself is among them, and a draw with it counts as half a win, as in the paper's
    estimate of P(y beats the policy). The mean over a group is therefore 1/2.

    Args:
        rewards_B: any float dtype.
        group_ids_B: any integers; samples of one prompt share an id.
        scale: chance to beat a sample = sigmoid(difference of the rewards / scale). None: 1 with
            the higher reward, 1/2 with an equal one, 0 with the lower one.
    """
    rates_B = torch.empty(len(rewards_B), dtype=torch.float64, device=rewards_B.device)
    for rows_N in Siblings.of(group_ids_B).rows():
        own_N = rewards_B[rows_N].double()
        lead_NN = own_N[:, None] - own_N[None]
        chance_NN = (lead_NN.sign() + 1) / 2 if scale is None else (lead_NN / scale).sigmoid()
        rates_B[rows_N] = chance_NN.mean(1)
    return rates_B


@ADVANTAGES.register(WinRateConfig)
@dataclass(frozen=True)
class WinRate(SampleEstimator):
    """Advantage win rate - 1/2, the same on every trained token of a sample; 0 in a group of
    one."""

    config: WinRateConfig

    def per_sample(self, samples: Samples) -> Tensor:
        """Return the win rate of each sample's total reward, minus 1/2, float64 `[B]`; ValueError
        without rewards."""
        rewards_B = total_rewards(samples)
        return win_rates(rewards_B, samples.group_ids, scale=self.config.scale) - 0.5
