"""Generalised advantage estimation over the turns of an episode (arXiv 2512.17008), and over turns
and tokens (bi-level, VAGEN, arXiv 2510.16907)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.advantages.discounting import discounted_sums
from roll.algorithms.advantages.rewards import total_rewards
from roll.algorithms.advantages.turns.rewards import rewards_of_turns
from roll.algorithms.loss_interface import Estimate
from roll.algorithms.registries import ADVANTAGES
from roll.config.algorithm.advantages import TurnGaeConfig
from roll.core.batches import RolloutBatch
from roll.core.types import Turn


@ADVANTAGES.register(TurnGaeConfig)
@dataclass(frozen=True)
class TurnGae:
    """GAE whose steps are turns: that of a turn is

        reward + gamma * V(next turn) - V(turn) + gamma * turn_lambda * (that of the next turn)

    where V is the critic's value before the first token of a turn, and 0 after the last turn.
    Without `token_lambda` all tokens of a turn have its advantage. With it, the turn is worth what
    is behind its last token (reward, and value and advantage of the next turn), and GAE over the
    tokens, without a discount, divides that among them; the advantages of turns stay the same. The
    critic's target of a token is advantage plus value; without `token_lambda`, that of the first
    token of its turn.
    """

    config: TurnGaeConfig

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Compute advantages and returns.

        Raises:
            ValueError: the batch has no rewards or values, or its samples are no episodes.
        """
        values_BT = batch.require("values", made_by="add_values")
        if batch.turns is None:
            raise ValueError("turn_gae compares turns of episodes, and these samples have none")
        rewards = rewards_of_turns(batch.turns, total_rewards(batch))
        advantages_BT = torch.zeros_like(values_BT, dtype=torch.float32)
        returns_BT = torch.zeros_like(advantages_BT)
        for row, (turns, paid) in enumerate(zip(batch.turns, rewards, strict=True)):
            tokens = [_trained(turn, batch.loss_mask[row]) for turn in turns]
            values = [values_BT[row, places].double() for places in tokens]
            own = zip(tokens, *self._episode(values, paid), strict=True)
            for places, advantages_L, returns_L in own:
                advantages_BT[row, places] = advantages_L.float()
                returns_BT[row, places] = returns_L.float()
        return Estimate(advantages_BT, returns_BT)

    def _episode(
        self, values: list[Tensor], rewards: list[float]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return advantages and returns of the trained tokens of each turn of an episode.

        Args:
            values: values of these tokens, turn by turn, each float64 `[L]`.
            rewards: reward of each turn.
        """
        gamma, token_lambda = self.config.gamma, self.config.token_lambda
        advantages, returns = list[Tensor](), list[Tensor]()
        behind = 0.0  # discounted value and advantage of the next turn
        for values_L, reward in zip(reversed(values), reversed(rewards), strict=True):
            worth = reward + behind
            if token_lambda is None:
                first_L = values_L[:1].expand_as(values_L)
                advantages.append(worth - first_L)
                returns.append(torch.full_like(values_L, worth))
            else:
                advantages.append(_within(values_L, worth, token_lambda))
                returns.append(advantages[-1] + values_L)
            if len(values_L):
                value = float(values_L[0])
                behind = gamma * (value + self.config.turn_lambda * (worth - value))
            else:  # nothing of the turn is trained
                behind = worth
        return advantages[::-1], returns[::-1]


def _trained(turn: Turn, mask_T: Tensor) -> Tensor:
    """Return the places of the trained tokens of a turn."""
    return turn.begin + mask_T[turn.begin : turn.end].nonzero()[:, 0]


def _within(values_L: Tensor, worth: float, token_lambda: float) -> Tensor:
    """Return the advantages of the tokens of a turn, after whose last token comes `worth`."""
    if not len(values_L):
        return values_L
    deltas_L = torch.cat([values_L[1:], values_L.new_tensor([worth])]) - values_L
    decay_1 = torch.tensor([token_lambda], dtype=torch.float64)
    return discounted_sums(deltas_L[None], decay_1)[0]
