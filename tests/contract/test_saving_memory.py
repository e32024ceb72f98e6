"""A rank that saves a model for Hugging Face never has the whole model."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peak_memory import PeakMemory
from roll.config.sections.model import ModelConfig
from roll.core.types import WorkerSpec
from tests.contract.backends import TRAIN_BACKENDS
from tests.contract.ranks import run_ranks
from tests.tiny import save_deep_model

DEEP = "deep"


def job(spec: WorkerSpec, folder: Path, name: str) -> dict[str, int]:
    """Return the peak while the model is saved, in bytes above what this rank had before."""
    backend = next(each for each in TRAIN_BACKENDS if each.name == name)
    strategy: Any = backend.build(spec, ModelConfig(path=str(folder.parent / DEEP)))
    gc.collect()
    with PeakMemory() as memory:
        strategy.save_hf(folder / "hf")
    strategy.close()
    return {"peak": memory.peak_bytes}


@pytest.mark.parametrize("name", ["fsdp2", pytest.param("deepspeed-zero3", marks=pytest.mark.slow)])
def test_saving_needs_a_few_tensors(tmp_path: Path, name: str) -> None:
    whole = save_deep_model(tmp_path / DEEP)
    found = run_ranks(2, partial(job, name=name), tmp_path / "ranks", timeout_s=300)
    peaks = [each["peak"] for each in found]
    assert max(peaks) < whole / 4, (peaks, whole)
