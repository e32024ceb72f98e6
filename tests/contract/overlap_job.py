"""What every rank of a Megatron layout is put through with gradients that are reduced in the
backward pass: several updates, whose numbers of micro-batches differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.config.sections.model import LoraConfig, ModelConfig
from roll.config.sections.optimizers.kinds import AdamWConfig
from roll.config.sections.strategy import MegatronConfig
from roll.core.types import WorkerSpec
from roll.strategy.training.group import GroupMembership
from tests.contract.backends import TrainBackend
from tests.contract.train_job import EntropyBonusLoss, exported, rows_of, train_batch

MEGATRON = TrainBackend("", MegatronConfig, ())
UPDATES = ([0, 1, 2, 3, 4, 5, 6, 7], [2, 5, 6, 3], [0, 4, 1, 7, 6, 3, 2, 5])
"""Rows of each update. The first is reduced at its end: it counts the gradients of the others."""
ADAM = AdamWConfig(lr=1e-3, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    layout: Mapping[str, Any]
    model: str = "dense"
    packing: bool = False
    model_options: Mapping[str, Any] = field(default_factory=dict)


LORA = {"lora": LoraConfig(rank=3, alpha=7.0, targets=("q_proj", "down_proj"))}
FROZEN = {"freeze": ("model.embed_tokens.*", "model.layers.0.*", "*.input_layernorm.*")}


def job(spec: WorkerSpec, folder: Path, cases: Mapping[str, Case]) -> dict[str, Any]:
    """Metrics and weights after all updates, by case, without and with overlaps."""
    group = GroupMembership(spec)
    results = {
        name: [updated(spec, folder.parent, case, own) for own in overlaps(case)]
        for name, case in cases.items()
    }
    group.leave()
    return results


def overlaps(case: Case) -> list[dict[str, Any]]:
    """Settings of the runs of a case."""
    reduce = {"overlap_grad_reduce": True}
    gather = [{**reduce, "overlap_param_gather": True}]
    return [{}, reduce, *(gather if case.layout.get("distributed_optimizer") else ())]


def updated(
    spec: WorkerSpec, folder: Path, case: Case, overlap: Mapping[str, Any]
) -> dict[str, Any]:
    strategy: Any = MEGATRON.build(
        spec,
        ModelConfig(path=str(folder / case.model), **case.model_options),
        budget=24,
        optimizer=ADAM,
        packing=case.packing,
        **overlap,
        **case.layout,
    )
    metrics, scores, pending = [], [], []
    for number, rows in enumerate(UPDATES):
        mine = rows_of(strategy, train_batch().select(rows))
        if number != 1:  # passes without gradients between the updates, but between the first two
            scores.append(strategy.score(mine).logprobs_BT)
        metrics.append(strategy.train(mine, EntropyBonusLoss()).values_by_name())
        pending.append(ungathered(strategy._model.chunks))
    result = {
        "metrics": metrics,
        "scores": scores,
        "pending": pending,
        "weights": exported(strategy),
        "left": ungathered(strategy._model.chunks),
    }
    strategy.close()
    return result


def ungathered(chunks: Sequence[Any]) -> int:
    """Number of buckets whose weights each rank has only in part."""
    groups = (g for c in chunks for g in c.bucket_groups + c.expert_parallel_bucket_groups)
    return sum(not group.param_gather_dispatched for group in groups)
