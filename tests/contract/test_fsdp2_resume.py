"""An FSDP2 checkpoint goes on in every other layout: the same bits, the same next loss."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import Fsdp2Config
from roll.core.metrics import Metrics
from roll.core.types import WorkerSpec
from roll.strategy.interfaces import TrainStrategy
from roll.strategy.training.group import GroupMembership
from tests.contract.backends import TrainBackend
from tests.contract.layout_job import save_models
from tests.contract.ranks import Job, run_ranks
from tests.contract.train_job import (
    ADAM,
    EntropyBonusLoss,
    exported,
    leaders,
    rows_of,
    train_batch,
)

LAYOUTS: dict[str, tuple[int, dict[str, Any], str]] = {
    # ranks, sizes and model
    "one": (1, {}, "biased"),
    "dp 2": (2, {}, "biased"),
    "ulysses 2": (2, {"ulysses": 2}, "biased"),
    "replicas 2": (2, {"replicas": 2}, "biased"),
    "tp 2": (2, {"tp": 2}, "biased"),
    "tp 2, dp 2": (4, {"tp": 2}, "biased"),
    "experts, one": (1, {}, "experts"),
    "experts, dp 2": (2, {}, "experts"),
    "experts, ep 2": (2, {"ep": 2}, "experts"),
    "experts, ep 2, dp 2": (4, {"ep": 2}, "experts"),
}


def read_by(reader: str) -> list[str]:
    """Layouts of the same model that are written before it reads."""
    ranks, _, model = LAYOUTS[reader]
    return [
        writer
        for writer, (before, _, written) in LAYOUTS.items()
        if written == model and (before, ranks) != (1, 4)  # four ranks come before one
    ]


PAIRS = [(writer, reader) for reader in LAYOUTS for writer in read_by(reader)]


def strategy_of(layout: str, spec: WorkerSpec, folder: Path) -> TrainStrategy[Any]:
    _, sizes, name = LAYOUTS[layout]
    backend = TrainBackend("", Fsdp2Config, (), settings=sizes)
    model = ModelConfig(path=str(folder / name))
    return backend.build(spec, model, optimizer=ADAM, total_steps=6)


def of_ranks(ranks: int) -> list[str]:
    return [name for name, (size, _, _) in LAYOUTS.items() if size == ranks]


def write(spec: WorkerSpec, folder: Path) -> dict[str, Any]:
    """Two updates, a checkpoint, and the update after it."""
    results = {}
    for layout in of_ranks(spec.world_size):
        strategy = strategy_of(layout, spec, folder.parent)
        for _ in range(2):
            strategy.train(rows_of(strategy, train_batch()), EntropyBonusLoss())
        strategy.save(folder.parent / layout)
        results[layout] = _update(strategy)
    return results


def read(spec: WorkerSpec, folder: Path) -> dict[tuple[str, str], Any]:
    """The update after each checkpoint that there is."""
    results = {}
    for layout in of_ranks(spec.world_size):
        strategy = strategy_of(layout, spec, folder.parent)
        for writer in read_by(layout):
            strategy.load(folder.parent / writer)
            results[writer, layout] = _update(strategy)
    return results


def _update(strategy: TrainStrategy[Any]) -> dict[str, Any]:
    before = exported(strategy)
    metrics = strategy.train(rows_of(strategy, train_batch()), EntropyBonusLoss())
    return {
        "info": strategy.rank_info,
        "before": before,
        "metrics": metrics,
        "weights": exported(strategy),
    }


LAUNCHES: tuple[tuple[int, tuple[Job, ...]], ...] = (
    (2, (write,)),
    (4, (write, read)),
    (1, (write, read)),
    (2, (read,)),
)
"""Ranks, and what they do."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("resume")
    save_models(folder)
    found: dict[Any, list[dict[str, Any]]] = {}
    for i, (ranks, jobs) in enumerate(LAUNCHES):
        results = run_ranks(ranks, partial(_all, jobs=jobs), folder / str(i), timeout_s=200)
        found |= {key: [rank[key] for rank in results] for key in results[0]}
    return found


def _all(spec: WorkerSpec, folder: Path, jobs: tuple[Job, ...]) -> dict[Any, Any]:
    group = GroupMembership(spec)
    results: dict[Any, Any] = {}
    for job in jobs:
        results |= job(spec, folder)
    group.leave()
    return results


def values(updates: list[dict[str, Any]]) -> dict[str, float]:
    return Metrics.concat([each["metrics"] for each in leaders(updates)]).values_by_name()


@pytest.mark.slow
@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_the_next_update_is_the_same(
    runs: dict[Any, list[dict[str, Any]]], writer: str, reader: str
) -> None:
    written, resumed = runs[writer], runs[writer, reader]
    for rank in resumed:
        for name, tensor in written[0]["before"].items():
            assert torch.equal(rank["before"][name], tensor), name
    want, got = values(written), values(resumed)
    if writer == reader:
        assert got == want
    for key in ("loss/total", "loss/policy", "entropy", "grad_norm", "lr"):
        assert got[key] == pytest.approx(want[key], rel=1e-6), key
    for name, tensor in written[0]["weights"].items():
        # Moments are in the step: fresh ones would move each weight by the rate, 1e-3.
        torch.testing.assert_close(resumed[0]["weights"][name], tensor, atol=2e-6, rtol=1e-5)
