"""Objectives of training: a loss to minimize and the dataset that it is computed on."""

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
    """Interface of an objective: a loss and further metrics, each a mean over tokens or pairs."""

    metrics: ClassVar[tuple[str, ...]]
    """Names of the metrics; the loss is called `loss`."""

    @property
    def dataset(self) -> Dataset: ...

    def count(self, examples: Sequence[int]) -> int:
        """Return the number of tokens or pairs of the examples, the divisor of the means."""

    def sums(self, logprobs_N: Tensor, micro: Micro) -> dict[str, Tensor]:
        """Return the sum of each metric over a micro-batch, by name of the metric.

        Args:
            logprobs_N: log-probabilities `[N]` of the trained tokens of the micro-batch.
        """


@dataclass(frozen=True)
class Likelihood:
    """Objective of pretraining and SFT: the mean over all trained tokens."""

    metrics: ClassVar[tuple[str, ...]] = TOKEN_METRICS
    dataset: Dataset

    def count(self, examples: Sequence[int]) -> int:
        return sum(self.dataset.num_trained(example) for example in examples)

    def sums(self, logprobs_N: Tensor, micro: Micro) -> dict[str, Tensor]:
        return token_sums(logprobs_N)


@dataclass(frozen=True)
class Preference:
    """Objective of DPO: the mean over pairs."""

    metrics: ClassVar[tuple[str, ...]] = PAIR_METRICS
    dataset: Dataset
    reference_S: Tensor
    """Log-probabilities of the sequences under the frozen model, `[sequences of the dataset]`."""
    dpo: Dpo

    def count(self, examples: Sequence[int]) -> int:
        return len(examples)

    def sums(self, logprobs_N: Tensor, micro: Micro) -> dict[str, Tensor]:
        reference_S = self.reference_S[micro.sequences].to(logprobs_N.device)
        return pair_sums(sequence_sums(logprobs_N, micro), reference_S, self.dpo)


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one training step."""

    means: dict[str, float]
    """Mean of each metric over the tokens or pairs of the step, by name."""
    grad_norm: float
    """Norm of the gradient of all parameters, before scaling down."""
    skipped: bool
    """True if the norm was zero or not finite, so that the weights did not change."""


def train_step(
    policy: Policy, objective: Objective, examples: Sequence[int], lr: float
) -> StepMetrics:
    """Update the weights once. All ranks must call it, with the same examples.

    Args:
        objective: loss and dataset.
        examples: numbers of the examples of the step, of all ranks together.
    """
    means = _pass(policy, objective, [examples], forward_only=False)
    done = step(policy.optimizer, policy.chunks, lr=lr)
    return StepMetrics(means, done.grad_norm, done.skipped)


def evaluate(policy: Policy, objective: Objective, per_step: int) -> dict[str, float]:
    """Return the mean of each metric over the whole dataset, by name. All ranks must call it.

    Args:
        objective: metrics and dataset.
        per_step: number of examples that are computed together.
    """
    every = range(len(objective.dataset))
    parts = [every[start : start + per_step] for start in every[::per_step]]
    return _pass(policy, objective, parts, forward_only=True)


def _pass(
    policy: Policy, objective: Objective, parts: Sequence[Sequence[int]], *, forward_only: bool
) -> dict[str, float]:
    """Run the examples of all parts and return the mean of each metric, by name.

    Each token or pair has the same weight in a mean, no matter how many ranks there are and how the
    examples are divided into micro-batches.
    """
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
