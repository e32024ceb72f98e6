"""What every rank of a backend does to show how much memory it needs while it loads a model."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from benchmarks.peak_memory import PeakMemory
from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import DeepspeedConfig, Fsdp2Config
from roll.config.sections.training import ScoreRole, TrainRole
from roll.core.types import WorkerSpec
from roll.strategy.build import build_score, build_train
from roll.strategy.training.group import GroupMembership
from roll.strategy.training.heads import PolicyHead

HEAD = PolicyHead(1.0, 1024)
LARGE, TINY, EXPERTS, TINY_EXPERTS = "large", "tiny", "experts", "tiny experts"
"""Folders of the models, beside that of the job."""


def job(spec: WorkerSpec, folder: Path, case: str) -> dict[str, int]:
    """Return the peaks of this rank in bytes above what it had before.

    The backend has loaded a tiny model before, because the first one also loads code. A process
    does nothing else, because it would load into memory that was freed and is still its own.
    """
    model, trained, settings = cases(spec.world_size)[case]
    group = GroupMembership(spec)
    tiny = TINY_EXPERTS if model == EXPERTS else TINY
    _build(spec, folder.parent / tiny, settings, trained=trained).close()
    gc.collect()
    with PeakMemory() as memory:
        strategy = _build(spec, folder.parent / model, settings, trained=trained)
    strategy.close()
    group.leave()
    return {"peak": memory.peak_bytes, "resident": memory.resident_bytes}


def cases(ranks: int) -> dict[str, tuple[str, bool, Any]]:
    """Return the model, whether it is trained, and the strategy of each case."""
    zero3 = DeepspeedConfig(stage=3, bucket_elements=100_000, whole_below_elements=2000)
    found: dict[str, tuple[str, bool, Any]] = {
        "fsdp2": (LARGE, False, Fsdp2Config()),
        "fsdp2, trained": (LARGE, True, Fsdp2Config()),
        "fsdp2, tp": (LARGE, False, Fsdp2Config(tp=2)),
        "zero3": (LARGE, False, zero3),
    }
    if ranks == 2:
        found["fsdp2, fused experts"] = (EXPERTS, False, Fsdp2Config())
        found["fsdp2, ep"] = (EXPERTS, False, Fsdp2Config(ep=2))
        found["zero3, fused experts"] = (EXPERTS, False, zero3)
    return found


def _build(spec: WorkerSpec, folder: Path, strategy: Any, *, trained: bool) -> Any:
    model = ModelConfig(path=str(folder))
    if trained:
        role = TrainRole(pool="p", strategy=strategy)
        return build_train(role, model, spec, HEAD, total_steps=None)
    return build_score(ScoreRole(pool="p", strategy=strategy), model, spec, HEAD)
