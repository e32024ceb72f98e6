"""vLLM on one GPU: its log-probs are the trainer's, it takes pushes, and it gives memory back."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from benchmarks.gpu.models import write_model
from tests.contract.ranks import run_ranks
from tests.gpu.engine_job import MODEL, logprobs_job, push_job, sleep_job
from tests.tiny import save_tiny_model

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(600)]

LIMIT_S = 500
MEAN, MOST = 0, 1
BOUNDS = {"float32": (1e-4, 1e-3), "bfloat16": (2e-2, 0.3)}
"""Largest mean and single difference of log-probs, in nats. On CPUs float32 is within 1e-4; what a
GPU does is expected here, and to be replaced by measured figures."""


@pytest.mark.parametrize("dtype", BOUNDS)
def test_log_probs_of_the_engine_are_those_of_the_trainer(dtype: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / MODEL)
    job = partial(logprobs_job, dtype=dtype)
    (found,) = run_ranks(1, job, tmp_path / "ranks", timeout_s=LIMIT_S, platform="cuda")
    gaps = (found["engine"] - found["trainer"]).abs()
    assert float(gaps.mean()) < BOUNDS[dtype][MEAN]
    assert float(gaps.max()) < BOUNDS[dtype][MOST]


def test_a_push_through_gpu_memory_replaces_the_weights(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / MODEL)
    (found,) = run_ranks(1, push_job, tmp_path / "ranks", timeout_s=LIMIT_S, platform="cuda")
    sent, loaded = found["checksums"]
    assert sent is not None
    assert sent == loaded
    assert found["after"] < BOUNDS["float32"][MOST]
    assert found["before"] > 10 * BOUNDS["float32"][MOST]


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_sleeps_gives_its_memory_back(level: int, tmp_path: Path) -> None:
    """A model of 0.6 B parameters (1.2 GB) and a KV cache of 4 GiB."""
    write_model(tmp_path / MODEL, "0.6B")
    job = partial(sleep_job, level=level)
    (found,) = run_ranks(1, job, tmp_path / "ranks", timeout_s=LIMIT_S, platform="cuda")
    used = found["used"]
    assert used["awake"] - used["asleep"] > 5000, used
    assert used["weights"] - used["asleep"] > 1000, used
    assert used["again"] - used["weights"] > 3900, used
    assert abs(used["again"] - used["awake"]) < 500, used
    first, second = found["tokens"]
    assert first == second
