"""Division of a step's samples into those of tags with settings of their own, and the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from roll.algorithms.loss_interface import AdvantageEstimator
from roll.algorithms.shaping.interface import RewardShaping
from roll.core.batches import RolloutBatch
from roll.core.metrics import Mean, Metrics
from roll.core.sample_table import SampleTable

S = TypeVar("S", RolloutBatch, SampleTable)


@dataclass(frozen=True)
class Lesson:
    """Shaping of rewards by name, and the estimator of the advantages from them.

    Both compute from the samples that they are given alone: a mean of the step is one of these.
    """

    reward_parts: Mapping[str, RewardShaping]
    estimator: AdvantageEstimator


@dataclass(frozen=True)
class Division:
    """Samples of a step that are shaped and estimated together."""

    tag: str | None
    """Tag of the samples; None for those of all tags without settings of their own."""
    rows_N: Tensor | None
    """Numbers of the samples in the batch, int64; None if these are all samples of the step."""

    def of(self, batch: S) -> S:
        """Return these samples of the batch."""
        return batch if self.rows_N is None else batch.select(self.rows_N)

    def part(self, values_B: Tensor) -> Tensor:
        """Return the values of these samples, from one value per sample of the whole step."""
        return values_B if self.rows_N is None else values_B[self.rows_N]

    def put(self, found: Tensor, into: Tensor) -> Tensor:
        """Return a copy of `into`, the values of all samples, with those of these samples replaced
        by `found`; `found` itself if these are all samples."""
        return found if self.rows_N is None else into.index_copy(0, self.rows_N, found)


def divisions(tags: Sequence[str], apart: Mapping[str, object]) -> Iterator[Division]:
    """Yield the samples of all tags that are not in `apart`, then those of each tag of it, in its
    order, as far as there are any. Without `apart`, yield one division of all samples.

    Args:
        tags: tag of each sample of the step.
        apart: tags with settings of their own, as keys.
    """
    if not apart:
        yield Division(None, None)
        return
    rows: dict[str | None, list[int]] = {None: [], **{tag: [] for tag in apart}}
    for row, tag in enumerate(tags):
        rows[tag if tag in apart else None].append(row)
    for own, numbers in rows.items():
        if numbers:
            yield Division(own, torch.tensor(numbers))


def tag_metrics(batch: RolloutBatch | SampleTable) -> Metrics:
    """Return `tag/<tag>/advantage_abs_mean` and `tag/<tag>/trained_tokens_fraction` of a batch with
    advantages; nothing if all samples have one tag."""
    rows: dict[str, list[int]] = {}
    for row, tag in enumerate(batch.tags):
        rows.setdefault(tag, []).append(row)
    if len(rows) < 2:
        return Metrics()
    tokens_B = batch.trained_tokens().double()
    sizes = batch.require("advantages", made_by="add_advantages").double().abs()
    sums_B = sizes * tokens_B if isinstance(batch, SampleTable) else sizes.sum(1)
    found: dict[str, Mean] = {}
    total = tokens_B.sum().item()
    for tag in sorted(rows):
        mine_N = torch.tensor(rows[tag])
        count = tokens_B[mine_N].sum().item()
        found[f"tag/{tag}/advantage_abs_mean"] = Mean(sums_B[mine_N].sum().item(), count)
        found[f"tag/{tag}/trained_tokens_fraction"] = Mean(count, total)
    return Metrics(dict(found))
