"""What is minimized, and on which data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mcore_adapter.modeling.optimizer import step
from mcore_adapter.train.data.dataset import Dataset
from mcore_adapter.train.data.micro_batches import Micro
from mcore_adapter.train.losses import PAIR_METRICS, TOKEN_METRICS, pair_sums, token_sums
from mcore_adapter.train.policy import Policy
from mcore_adapter.train.references import sequence_sums
from mcore_adapter.train.settings import Dpo


class Objective(Protocol):
    """A loss that is a mean over tokens or pairs, and more metrics that are."""

    metrics: ClassVar[tuple[str, ...]]

    @property
    def dataset(self) -> Dataset: ...

    def count(self, examples: Sequence[int]) -> int:
        """Tokens or pairs of the given examples, which sums over them are divided by."""

    def sums(self, logprobs_N: Tensor, micro: Micro) -> dict[str, Tensor]:
        """Of a micro-batch, one of each of the metrics."""


@dataclass(frozen=True)
class Likelihood:
    """Pretraining and SFT: the mean over all tokens that are trained on."""

    metrics: ClassVar[tuple[str, ...]] = TOKEN_METRICS
    dataset: Dataset

    def count(self, examples: Sequence[int]) -> int:
        return sum(self.dataset.num_trained(example) for example in examples)

    def sums(self, logprobs_N: Tensor, micro: Micro) -> dict[str, Tensor]:
        return token_sums(logprobs_N)


@dataclass(frozen=True)
class Preference:
    """DPO: the mean over pairs."""

    metrics: ClassVar[tuple[str, ...]] = PAIR_METRICS
    dataset: Dataset
    reference_S: Tensor
    """Log-probabilities of the sequences of the dataset under the frozen model."""
    dpo: Dpo

    def count(self, examples: Sequence[int]) -> int:
        return len(examples)

    def sums(self, logprobs_N: Tensor, micro: Micro) -> dict[str, Tensor]:
        reference_S = self.reference_S[micro.sequences].to(logprobs_N.device)
        return pair_sums(sequence_sums(logprobs_N, micro), reference_S, self.dpo)


@dataclass(frozen=True)
class StepMetrics:
    means: dict[str, float]
    grad_norm: float
    skipped: bool


def train_step(
    policy: Policy, objective: Objective, examples: Sequence[int], lr: float
) -> StepMetrics:
    """One update on the examples of all ranks; a collective."""
    means = _pass(policy, objective, [examples], forward_only=False)
    done = step(policy.optimizer, policy.chunks, lr=lr)
    return StepMetrics(means, done.grad_norm, done.skipped)


def evaluate(policy: Policy, objective: Objective, per_step: int) -> dict[str, float]:
    """Means over the whole dataset; a collective."""
    every = range(len(objective.dataset))
    parts = [every[start : start + per_step] for start in every[::per_step]]
    return _pass(policy, objective, parts, forward_only=True)


def _pass(
    policy: Policy, objective: Objective, parts: Sequence[Sequence[int]], *, forward_only: bool
) -> dict[str, float]:
    """Whatever is cut into micro-batches, over how many ranks, each token or pair counts alike."""
    count = sum(objective.count(part) for part in parts)

    weight = 0.0 if forward_only else policy.mtp_loss_weight
    metrics = (*objective.metrics, "mtp_loss") if weight else objective.metrics

    def reduce(logprobs: Sequence[Tensor], micro: Micro) -> tuple[Tensor, Tensor]:
        sums, (_, *further) = objective.sums(logprobs[0], micro), logprobs
        loss = sums["loss"]
        if weight:
            sums["mtp_loss"] = -torch.cat(further).sum() / len(further)
            loss = loss + weight * sums["mtp_loss"]
        return loss / count, torch.stack([sums[name].detach().double() for name in metrics])

    kept = [
        sums
        for part in parts
        for sums in policy.run(objective.dataset, part, reduce, forward_only=forward_only)
    ]
    totals = policy.total(kept, len(metrics))
    return {name: sum_ / count for name, sum_ in zip(metrics, totals, strict=True)}
