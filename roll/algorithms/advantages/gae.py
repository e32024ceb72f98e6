"""Generalised advantage estimation from a critic's values (GAE, arXiv 1506.02438)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.advantages.discounting import discounted_sums
from roll.algorithms.advantages.trained import TrainedTokens
from roll.algorithms.loss_interface import Estimate
from roll.algorithms.registries import ADVANTAGES
from roll.config.algorithm.advantages import GaeConfig
from roll.core.batches import RolloutBatch

POSITIONS = 2**18
"""Number of positions (rows times length) that are processed at a time. Intermediate results of
a few rows, which are independent of other rows, stay in the cache. Intermediate results of a whole
step are so large that allocating their memory takes several times as long as the arithmetic. Rows
of about equal length are processed together, so that their padding costs nothing."""


def length_adaptive_lambda(tokens_B: Tensor, alpha: float) -> Tensor:
    """Return 1 - 1 / (alpha * tokens), at least 0, float64 `[B]` (VAPO, arXiv 2504.05118).

    The weights of the terms in GAE add up to 1 / (1 - lambda), which is then alpha * tokens. A
    token of a longer response is thus credited for rewards further away.
    """
    return (1 - 1 / (alpha * tokens_B.double().clamp(min=1))).clamp(min=0)


@ADVANTAGES.register(GaeConfig)
@dataclass(frozen=True)
class Gae:
    """Sum over j >= t of (gamma * lambda)**(j - t) * (reward_j + gamma * value_{j+1} - value_j).

    The steps are the trained tokens; values and rewards of other tokens are not read. The reward of
    a sample belongs to its last trained token, and each token reward to its token. The value after
    the last trained token is 0. The critic's target is advantage plus value. With `critic_lambda`,
    the advantage in this target has a lambda of its own (VC-PPO, arXiv 2503.01491).
    """

    config: GaeConfig

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Compute advantages and returns; raise ValueError without rewards or values."""
        values_BT = batch.require("values", made_by="add_values")
        rewards_B = batch.require("rewards", made_by="assemble")
        paid_BT = batch.token_rewards
        advantages_BT = torch.zeros_like(values_BT, dtype=torch.float32)
        returns_BT = torch.zeros_like(advantages_BT)
        tokens = TrainedTokens.of(batch.loss_mask)
        for rows, width in _alike(batch.lengths):
            advantages_RW, returns_RW = self._estimate(
                tokens.some(rows, width),
                values_BT[:, :width].index_select(0, rows),
                rewards_B[rows],
                None if paid_BT is None else paid_BT[:, :width].index_select(0, rows),
            )
            advantages_BT[rows, :width] = advantages_RW
            returns_BT[rows, :width] = returns_RW
        return Estimate(advantages_BT, returns_BT)

    def _estimate(
        self, tokens: TrainedTokens, values_BT: Tensor, rewards_B: Tensor, paid_BT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute advantages and returns of some rows, both float32 `[B, T]`."""
        gamma, critic_lambda = self.config.gamma, self.config.critic_lambda
        values_BL = tokens.pack(values_BT)
        deltas_BL = -values_BL if paid_BT is None else tokens.pack(paid_BT).sub_(values_BL)
        deltas_BL[:, :-1].add_(values_BL[:, 1:], alpha=gamma)
        tokens.add_at_last(deltas_BL, rewards_B)

        policy_lambda_B = self._policy_lambda(tokens.count_B)
        advantages_BL = discounted_sums(deltas_BL, gamma * policy_lambda_B)
        targets_BL = advantages_BL
        if critic_lambda is not None:
            targets_BL = discounted_sums(deltas_BL, _one(gamma * critic_lambda))
        returns_BL = targets_BL + values_BL
        return tokens.unpack(advantages_BL.float()), tokens.unpack(returns_BL.float())

    def _policy_lambda(self, tokens_B: Tensor) -> Tensor:
        """Return lambda of each row `[B]`, or of all rows `[1]`, float64."""
        if self.config.adaptive_alpha is not None:
            return length_adaptive_lambda(tokens_B, self.config.adaptive_alpha)
        assert self.config.policy_lambda is not None
        return _one(self.config.policy_lambda)


def _alike(lengths_B: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield groups of rows of similar length: row numbers, and the length of the longest row.

    The longest rows come first. A group has at most `POSITIONS` positions, but at least one row.
    """
    order_B, start = lengths_B.argsort(descending=True), 0
    while start < len(order_B):
        width = max(int(lengths_B[order_B[start]]), 1)
        rows = order_B[start : start + max(1, POSITIONS // width)]
        yield rows, width
        start += len(rows)


def _one(number: float) -> Tensor:
    """Return the number as a float64 tensor `[1]`."""
    return torch.tensor([number], dtype=torch.float64)
