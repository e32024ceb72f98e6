"""What every rank of a Megatron layout is put through with the loss that balances experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import MegatronConfig
from roll.config.sections.training import TrainRole
from roll.core.batches import RolloutBatch
from roll.core.types import WorkerSpec
from roll.strategy.build import build_train
from roll.strategy.training.group import GroupMembership
from roll.strategy.training.heads import PolicyHead
from tests.contract.backends import PACKING, PLAIN_STEP
from tests.contract.train_job import EntropyBonusLoss, exported, rows_of, train_batch

FACTOR = 0.5


def batch() -> RolloutBatch:
    """Rows of 7, 6, 16 and 14 tokens."""
    return train_batch().select([2, 5, 0, 1])


def job(spec: WorkerSpec, folder: Path, options: Mapping[str, Any], budget: int) -> dict[str, Any]:
    """
    Args:
        options: those of the layout; `packing` is one of the role.
        budget: largest number of tokens of a micro-batch.
    """
    group = GroupMembership(spec)
    layout = {name: value for name, value in options.items() if name != PACKING}
    role = TrainRole(
        pool="p",
        strategy=MegatronConfig(aux_loss_coef=FACTOR, **layout),
        packing=PACKING in options,
        optimizer=PLAIN_STEP,
        max_tokens_per_microbatch=budget,
    )
    model = ModelConfig(path=str(folder.parent / "experts"))
    strategy = build_train(role, model, spec, PolicyHead(1.0, 16), total_steps=None)
    start = exported(strategy)
    strategy.train(rows_of(strategy, batch()), EntropyBonusLoss())
    result = {"start": start, "weights": exported(strategy)}
    group.leave()
    return result
