"""What every rank of a critic is put through."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from roll.algorithms.loss_interface import TokenLoss, ValueTerms
from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import DeepspeedConfig, Fsdp2Config, MegatronConfig
from roll.config.sections.training import TrainRole
from roll.core.batches import RolloutBatch
from roll.core.types import WorkerSpec
from roll.strategy.build import build_train
from roll.strategy.training.heads import ValueHead
from tests.contract.backends import PLAIN_STEP, ZERO_3
from tests.tiny import rollout_batch

ROWS = 8
STRATEGIES: dict[str, Fsdp2Config | DeepspeedConfig | MegatronConfig] = {
    "fsdp2": Fsdp2Config(),
    "deepspeed-zero2": DeepspeedConfig(stage=2),
    "deepspeed-zero3": DeepspeedConfig(**ZERO_3),
    "megatron": MegatronConfig(),
}


def squared_error(terms: ValueTerms, batch: RolloutBatch) -> TokenLoss:
    returns_BT = batch.require("returns", made_by="critic_batch")
    return TokenLoss(loss_BT=(terms.values_BT - returns_BT).square())


def critic_batch() -> RolloutBatch:
    batch = rollout_batch(ROWS, seed=3)
    g = torch.Generator().manual_seed(4)
    returns = torch.randn(batch.tokens.shape, generator=g)
    weights = batch.loss_mask.float() / batch.loss_mask.sum()
    return replace(batch, returns=returns, token_weights=weights)


def job(spec: WorkerSpec, folder: Path, name: str) -> dict[str, Any]:
    def role(budget: int = 16384) -> TrainRole:
        return TrainRole(
            pool="p",
            strategy=STRATEGIES[name],
            optimizer=PLAIN_STEP,
            max_tokens_per_microbatch=budget,
        )

    model = ModelConfig(path=str(folder.parent / "critic"))
    batch = critic_batch()
    results: dict[str, Any] = {}
    # Kept for its process group, which the others share.
    first = build_train(role(), model, spec, ValueHead(), total_steps=None)
    results["start"] = {key: tensor.clone() for key, tensor in first.export_weights()}
    for split, rows, budget in (
        ("whole", batch, 16384),
        ("one row each", batch, 1),
        ("shuffled", batch.select([5, 2, 7, 0, 3, 6, 1, 4]), 40),
    ):
        strategy = build_train(role(budget), model, spec, ValueHead(), total_steps=None)
        mine = rows.split(spec.world_size)[spec.rank]
        values_BT = strategy.score(mine).values_BT
        metrics = strategy.train(mine, squared_error)
        results[split] = {
            "values": values_BT,
            "metrics": metrics,
            "weights": {key: tensor.clone() for key, tensor in strategy.export_weights()},
        }
    first.save_hf(folder / "hf")
    fresh = ModelConfig(path=str(folder.parent / "policy"))
    new = build_train(role(), fresh, spec, ValueHead(), total_steps=None)
    results["fresh_values"] = new.score(batch.split(spec.world_size)[spec.rank]).values_BT
    first.close()
    return results
