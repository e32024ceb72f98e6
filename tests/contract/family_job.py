"""Every family of models on a training backend: what leaves it, and what it computes twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.config.sections.optimizers.kinds import AdamWConfig
from roll.core.batches import RolloutBatch
from roll.core.types import WorkerSpec
from tests.contract.backends import TRAIN_BACKENDS
from tests.contract.train_job import train_batch
from tests.families import config_of

STILL = AdamWConfig(lr=1e-30, weight_decay=0.0)
"""Changes no float32 number of everyday size."""


@dataclass
class Listening:
    """A policy gradient that notes the log-probs it is given, by sample."""

    heard: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        for name, row in zip(batch.sample_ids, terms.logprobs_BT.detach(), strict=True):
            self.heard[name] = row.clone()
        return TokenLoss(loss_BT=-terms.logprobs_BT)


def job(spec: WorkerSpec, folder: Path, *, backend: str, names: Sequence[str]) -> dict[str, Any]:
    """For each family the manifest, this rank's parts, and log-probs: scored, and trained twice."""
    made = next(b for b in TRAIN_BACKENDS if b.name == backend)
    results: dict[str, Any] = {}
    for name in names:
        model = config_of(folder.parent / name, name)
        strategy = made.build(spec, model, optimizer=STILL)
        batch = train_batch()
        twice = [Listening(), Listening()]
        results[name] = {
            "manifest": strategy.weight_manifest(),
            "parts": {key: part.clone() for key, part in strategy.export_parts()},
            "whole": {key: tensor.clone() for key, tensor in strategy.export_weights()},
            "scored": _by_sample(batch, strategy.score(batch).logprobs_BT),
        }
        for listening in twice:
            strategy.train(batch, listening)
        results[name]["trained"] = [listening.heard for listening in twice]
        if name == names[0]:
            first = strategy  # kept for its process group, which the others share
        else:
            strategy.close()
    first.close()
    return results


def _by_sample(batch: RolloutBatch, values_BT: Tensor) -> dict[str, Tensor]:
    return {name: row.clone() for name, row in zip(batch.sample_ids, values_BT, strict=True)}


def job_of(backend: str, names: Sequence[str]) -> Any:
    return partial(job, backend=backend, names=names)


def assembled(ranks: Sequence[Mapping[str, Any]], name: str) -> dict[str, Tensor]:
    """Whole tensors out of the ranks' parts, by the cuts that the manifest announces."""
    manifest = ranks[0][name]["manifest"]
    found = {}
    for i, meta in enumerate(manifest.tensors):
        cuts = manifest.cuts_of(i)
        parts = [rank[name]["parts"][meta.name].reshape(-1) for rank in ranks]
        sizes = [b - a for a, b in pairwise(cuts)]
        assert [len(part) for part in parts] == sizes, meta.name
        found[meta.name] = torch.cat(parts).view(meta.shape)
    return found
