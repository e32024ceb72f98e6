"""Update of a vision model of which only the vision part is trained, on rows without pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll.config.sections.model import LoraConfig, ModelConfig
from roll.core.types import WorkerSpec
from roll.strategy.training.group import GroupMembership
from tests.contract.backends import TRAIN_BACKENDS
from tests.contract.train_job import EntropyBonusLoss, exported, rows_of
from tests.contract.vision_job import BLIND, MIXED, vision_batch

FAMILY = "qwen3_vl"
BACKENDS = ("fsdp2", "deepspeed-zero2", "deepspeed-zero3")
TRAINED: dict[str, dict[str, Any]] = {
    "part": {"freeze": ("language",)},
    "adapter": {"lora": LoraConfig(rank=2, parts=("vision",))},
}


def job(spec: WorkerSpec, folder: Path) -> dict[Any, Any]:
    """Weights before and after, and metrics, by (backend, what is trained): first an update without
    pictures, then one with."""
    group, results = GroupMembership(spec), {}
    for made in TRAIN_BACKENDS:
        for name, options in TRAINED.items():
            if made.name not in BACKENDS:
                continue
            model = ModelConfig(path=str(folder.parent / FAMILY), **options)
            strategy = made.build(spec, model, budget=256, chunk=7)
            found: dict[str, Any] = {"start": exported(strategy)}
            for kind in (BLIND, MIXED):
                rows = rows_of(strategy, vision_batch(FAMILY, kind))
                found[f"metrics {kind}"] = strategy.train(rows, EntropyBonusLoss())
                found[kind] = exported(strategy)
            results[made.name, name] = found
            strategy.close()
    group.leave()
    return results
