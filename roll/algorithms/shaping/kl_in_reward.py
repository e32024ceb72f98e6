"""KL penalty in the token rewards, with a fixed or an adaptive coefficient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.registries import KL_ESTIMATORS
from roll.config.algorithm.shaping import KlInRewardConfig
from roll.core.batches import RolloutBatch
from roll.core.errors import CheckpointError
from roll.core.metrics import Last, Metrics

ERROR_LIMIT = 0.2
"""Bound on the relative error of the KL in the adaptive controller."""


def policy_kl(batch: RolloutBatch, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) of every trained token, in nats, float64 `[B, T]`.

    The result is zero outside the mask, even if log-probs there are NaN. The policy's log-probs are
    the trainer's `old_logprobs` if they are set, otherwise the engine's.

    Args:
        estimator: name in `KL_ESTIMATORS`, such as `k1`.

    Raises:
        ValueError: log-probs of the reference or of the policy are missing.
    """
    ref_BT = batch.require("ref_logprobs", made_by="add_logprobs")
    own_BT = batch.old_logprobs
    if own_BT is None:
        own_BT = batch.require("rollout_logprobs", made_by="assemble or add_logprobs")
    outside_BT = ~batch.loss_mask
    return KL_ESTIMATORS[estimator](
        own_BT.double().masked_fill(outside_BT, 0), ref_BT.double().masked_fill(outside_BT, 0)
    )


def sample_mean(values_BT: Tensor, mask_BT: Tensor) -> float:
    """Return the mean over samples of the mean over their trained tokens; 0 without such tokens.

    Args:
        values_BT: values that are zero outside the mask.
        mask_BT: bool, the trained tokens.
    """
    tokens_B = mask_BT.sum(1)
    means_B = values_BT.sum(1) / tokens_B.clamp(min=1)
    return (means_B.sum() / (tokens_B > 0).sum().clamp(min=1)).item()


def next_coef(coef: float, *, kl: float, target: float, samples: int, horizon: int) -> float:
    """Return coef * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon).

    This is the proportional controller of Ziegler et al. (arXiv 1909.08593, section 2.2).

    Args:
        kl: divergence of the step, in the unit of `target` (nats per token).
        samples: number of samples of the step.
        horizon: number of samples over which a clipped error changes the coefficient by a fifth.
    """
    error = min(max(kl / target - 1, -ERROR_LIMIT), ERROR_LIMIT)
    return coef * (1 + error * samples / horizon)


@dataclass
class KlInReward:
    """KL penalty in the rewards: token_rewards - coef * KL; see `KlInRewardConfig`.

    Metrics: `kl/in_reward`, the KL in nats per token that the controller keeps near its target;
    `kl/coef`, the coefficient of this step.
    """

    config: KlInRewardConfig
    current_coef: float = field(init=False)

    def __post_init__(self) -> None:
        self.current_coef = self.config.coef

    def __call__(self, batch: RolloutBatch) -> tuple[Tensor, Metrics]:
        """Return the new `token_rewards`, float32 `[B, T]`, and metrics.

        Call once per step, with the whole batch: each call adapts the coefficient.
        """
        config, kl_BT = self.config, policy_kl(batch, self.config.estimator)
        kl = sample_mean(kl_BT, batch.loss_mask)
        paid_BT = -self.current_coef * kl_BT
        if batch.token_rewards is not None:
            paid_BT = paid_BT + batch.token_rewards.double()
        metrics = Metrics({"kl/in_reward": Last(kl), "kl/coef": Last(self.current_coef)})
        if config.target is not None and bool(batch.loss_mask.any()):
            self.current_coef = next_coef(
                self.current_coef,
                kl=kl,
                target=config.target,
                samples=len(batch),
                horizon=config.horizon,
            )
        return paid_BT.to(torch.float32), metrics

    def state(self) -> dict[str, float]:
        """Return the adaptive coefficient; empty if the coefficient is fixed."""
        return {} if self.config.target is None else {"coef": self.current_coef}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the coefficient; raise CheckpointError if the keys are of another state."""
        if state.keys() != {"coef"}:
            raise CheckpointError(f"not the state of a KL coefficient: keys {sorted(state)}")
        self.current_coef = float(state["coef"])
