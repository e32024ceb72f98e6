"""A rank of fsdp2 never has the gradients of the whole model, whatever its micro-batches."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from benchmarks.peak_memory import PeakMemory, return_freed
from roll.config.sections.model import ModelConfig
from roll.core.types import WorkerSpec
from tests.contract.backends import TRAIN_BACKENDS
from tests.contract.ranks import run_ranks
from tests.contract.train_job import SMALL_BUDGET, EntropyBonusLoss, rows_of, train_batch
from tests.tiny import save_deep_model

DEEP = "deep"


def job(spec: WorkerSpec, folder: Path) -> dict[str, int]:
    """Return the peak of the second update, in bytes above what this rank had before."""
    return_freed()
    backend = next(each for each in TRAIN_BACKENDS if each.name == "fsdp2")
    strategy: Any = backend.build(
        spec, ModelConfig(path=str(folder.parent / DEEP)), budget=SMALL_BUDGET
    )
    rows, loss = rows_of(strategy, train_batch()), EntropyBonusLoss()
    strategy.train(rows, loss)  # makes the moments
    gc.collect()
    with PeakMemory() as memory:
        strategy.train(rows, loss)
    strategy.close()
    return {"peak": memory.peak_bytes}


def test_an_update_needs_the_gradients_of_a_shard(tmp_path: Path) -> None:
    whole = save_deep_model(tmp_path / DEEP)
    peaks = [each["peak"] for each in run_ranks(2, job, tmp_path / "ranks", timeout_s=300)]
    # Half of the gradients, and the weights and gradients of two layers of sixteen. All gradients
    # would be more than 1.5 times the weights.
    assert max(peaks) < whole, (peaks, whole)
    assert max(peaks) > 0.5 * whole  # else the meter reads nothing
