"""Parts as users bring them: equal to built-in ones, and broken ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field, PrivateAttr

from roll.extend import (
    Advantage,
    AdvantageShaping,
    Estimate,
    Last,
    LossTerm,
    Metrics,
    Need,
    PolicyLoss,
    PolicyTerms,
    Rewards,
    RewardShaping,
    RolloutBatch,
    SampleAdvantage,
    SampleMask,
    Samples,
    SampleWeight,
    Siblings,
    Tensor,
    TokenLoss,
    log_ratio,
    total_rewards,
)


class GroupRelative(SampleAdvantage):
    """The advantage `grpo`, written anew."""

    needs = frozenset({Need.SIBLINGS})
    std: Literal["group", "none"] = "group"
    eps: float = Field(default=1e-6, gt=0)

    def per_sample(self, samples: Samples) -> Tensor:
        rewards_B, siblings = total_rewards(samples), Siblings.of(samples.group_ids)
        centred_B = rewards_B - siblings.mean(rewards_B)
        return (
            centred_B / (siblings.std(rewards_B) + self.eps) if self.std == "group" else centred_B
        )


class EveryToken(Advantage):
    """The reward of the sample at each of its tokens."""

    def __call__(self, batch: RolloutBatch) -> Estimate:
        rewards_B = batch.require("rewards", made_by="assemble")
        return Estimate(rewards_B[:, None] * torch.ones_like(batch.loss_mask))


class Clipped(PolicyLoss):
    """The loss `ppo_clip`, written anew."""

    low: float = 0.2
    high: float = 0.2

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        advantages_BT = batch.require("advantages", made_by="add_advantages")
        ratio_BT = log_ratio(terms, batch).clamp(-20, 20).exp()
        bounded_BT = ratio_BT.clamp(1 - self.low, 1 + self.high)
        return TokenLoss(torch.maximum(-ratio_BT * advantages_BT, -bounded_BT * advantages_BT))


class Nearness(LossTerm):
    """The loss term `kl` with the estimator k2, written anew."""

    needs = frozenset({Need.REFERENCE})
    reads_advantages = False

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        ref_BT = batch.require("ref_logprobs", made_by="add_logprobs")
        return TokenLoss(0.5 * (terms.logprobs_BT - ref_BT).square())


class Dividing(SampleAdvantage):
    """Raises an error."""

    by: float = 0.0

    def per_sample(self, samples: Samples) -> Tensor:
        return total_rewards(samples) / (1 / self.by)


class Wide(SampleAdvantage):
    """Returns a shape that nobody expects."""

    def per_sample(self, samples: Samples) -> Tensor:
        return total_rewards(samples)[:, None]


class Endless(SampleAdvantage):
    """Returns numbers that are not finite."""

    def per_sample(self, samples: Samples) -> Tensor:
        return total_rewards(samples) / 0


class Unfinished(SampleAdvantage):
    """Has not the method that its base asks for."""


class Scalar(LossTerm):
    """Reduces the loss itself."""

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        return TokenLoss(terms.logprobs_BT.mean())


class Raising(LossTerm):
    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        return TokenLoss(terms.logprobs_BT * batch.bonus)  # type: ignore[attr-defined]


class Halved(RewardShaping):
    """The shaping `scale`, written anew."""

    factor: float = 0.5

    def __call__(self, rewards: Rewards, samples: Samples) -> tuple[Rewards, Metrics]:
        return rewards.map(lambda values_B: self.factor * values_B), Metrics()


class Centred(RewardShaping):
    """Reward minus the mean of all rewards so far, which checkpoints keep."""

    _total: float = PrivateAttr(0.0)
    _count: int = PrivateAttr(0)

    def __call__(self, rewards: Rewards, samples: Samples) -> tuple[Rewards, Metrics]:
        self._total += rewards.total_B.sum().item()
        self._count += len(samples)
        mean = self._total / self._count
        return rewards.map(lambda values_B: values_B - mean), Metrics({"mean": Last(mean)})

    def state(self) -> dict[str, float]:
        return {"total": self._total, "count": self._count}

    def load(self, state: Mapping[str, float]) -> None:
        self._total, self._count = state["total"], int(state["count"])


class Lucky(SampleMask):
    """Leaves out samples without any reward."""

    def __call__(self, samples: Samples) -> Tensor:
        return samples.require("rewards", made_by="assemble") > 0


class Counted(SampleMask):
    """Returns numbers where a bool is expected."""

    def __call__(self, samples: Samples) -> Tensor:
        return samples.group_ids


class Weightless(SampleWeight):
    """Returns weights of zero."""

    def __call__(self, samples: Samples) -> Tensor:
        return torch.zeros(len(samples))


class Doubled(AdvantageShaping):
    """Twice the advantages, also outside the mask."""

    def __call__(self, advantages_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Metrics]:
        return 2 * advantages_BT + 1.0, Metrics({"added": Last(1.0)})


NO_CLASS = 3
