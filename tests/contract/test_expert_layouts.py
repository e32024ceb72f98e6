"""Experts cut over more tensor parallel ranks than the rest: the gradient of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import MegatronConfig
from roll.core.types import WorkerSpec
from tests.contract.backends import TrainBackend
from tests.contract.ranks import run_ranks
from tests.contract.train_job import (
    EntropyBonusLoss,
    exported,
    gradient,
    relative_distance,
    rows_of,
    train_batch,
)
from tests.tiny import save_tiny_model

BACKEND = TrainBackend("", MegatronConfig, (), {"etp": 2}, experts=True)


def job(spec: WorkerSpec, folder: Path) -> dict[str, Any]:
    strategy = BACKEND.build(spec, ModelConfig(path=str(folder.parent / "model")), budget=60)
    rows = rows_of(strategy, train_batch())
    start = exported(strategy)
    strategy.train(rows, EntropyBonusLoss())
    run = {"weights": exported(strategy)}
    strategy.close()
    return {"lengths": rows.lengths.tolist(), "gradient": gradient(run, start)}


def test_ranks_with_rows_of_other_lengths_share_an_expert(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", experts=True)
    (alone,) = run_ranks(1, job, tmp_path / "1", timeout_s=100)
    ranks = run_ranks(2, job, tmp_path / "2", timeout_s=100)
    assert len({tuple(sorted(rank["lengths"])) for rank in ranks}) == 2
    for rank in ranks:
        assert relative_distance(rank["gradient"], alone["gradient"]) < 1e-6
