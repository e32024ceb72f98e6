"""A Megatron checkpoint of TP 2 x PP 2 goes on in other layouts: the same bits, the same loss."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from mcore_adapter.checkpoint_reader import WEIGHT, Saved
from mcore_adapter.convert.conversion_plan import tasks
from mcore_adapter.load import read_config
from mcore_adapter.models import table_of
from mcore_adapter.optimizer_state import MOMENTS
from mcore_adapter.parallel_sizes import ParallelSizes
from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import MegatronConfig
from roll.core.types import WorkerSpec
from roll.strategy.interfaces import TrainStrategy
from tests.contract.backends import TrainBackend
from tests.contract.ranks import run_ranks
from tests.contract.train_job import ADAM, EntropyBonusLoss, exported, rows_of, train_batch
from tests.tiny import save_tiny_model

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    # ranks and sizes of whoever goes on
    "the same": (4, {"tp": 2, "pp": 2}),
    "one rank": (1, {}),
    "dp 2": (2, {}),
    "dp 2 distributed": (2, {"distributed_optimizer": True}),
    "tp 2 and cp 2": (4, {"tp": 2, "cp": 2, "distributed_optimizer": True}),
}
MODELS: dict[str, Literal["float32", "bfloat16"]] = {"tied": "float32", "untied": "bfloat16"}
"""And the dtype that they compute in."""


def strategy_of(
    sizes: dict[str, Any], spec: WorkerSpec, folder: Path, name: str
) -> TrainStrategy[Any]:
    backend = TrainBackend("", MegatronConfig, (), sizes)
    model = ModelConfig(path=str(folder.parent / name), dtype=MODELS[name])
    return backend.build(spec, model, optimizer=ADAM, total_steps=6)


def write(spec: WorkerSpec, folder: Path) -> dict[str, Any]:
    """Two updates, a checkpoint, and the update after it."""
    results, kept = {}, []
    for name in MODELS:
        strategy = strategy_of({"tp": 2, "pp": 2}, spec, folder, name)
        rows = rows_of(strategy, train_batch())
        for _ in range(2):
            strategy.train(rows, EntropyBonusLoss())
        strategy.save(folder.parent / f"{name}.checkpoint")
        results[name] = _update(strategy)
        kept.append(strategy)  # the first holds the process group, which the others share
    return results


def go_on(spec: WorkerSpec, folder: Path, sizes: dict[str, Any]) -> dict[str, Any]:
    """What was loaded, written at once by the layout that loaded it; and the update after it."""
    results, kept = {}, []
    for name in MODELS:
        strategy = strategy_of(sizes, spec, folder, name)
        strategy.load(folder.parent / f"{name}.checkpoint")
        strategy.save(folder / f"{name}.checkpoint")
        results[name] = _update(strategy)
        kept.append(strategy)  # the first holds the process group, which the others share
    return results


def _update(strategy: TrainStrategy[Any]) -> dict[str, Any]:
    metrics = strategy.train(rows_of(strategy, train_batch()), EntropyBonusLoss())
    return {
        "info": strategy.rank_info,
        "metrics": metrics,
        "weights": exported(strategy),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    for name in MODELS:
        save_tiny_model(folder / name, tied=name == "tied")
    return folder


@pytest.fixture(scope="module")
def written(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(4, write, folder / "written", timeout_s=250)


@pytest.fixture(scope="module", params=LAYOUTS)
def resumed(
    request: pytest.FixtureRequest, folder: Path, written: list[dict[str, Any]]
) -> tuple[str, list[dict[str, Any]]]:
    ranks, sizes = LAYOUTS[request.param]
    job = partial(go_on, sizes=sizes)
    return request.param, run_ranks(ranks, job, folder / request.param, timeout_s=250)


def contents(checkpoint: Path, model: Path) -> dict[str, Tensor]:
    """Masters and moments as in the whole model."""
    table = table_of(read_config(model))
    saved = Saved(checkpoint / "model", table)
    return {
        f"{task.name} {kind}": saved.full(task, kind)
        for task in tasks(table, ParallelSizes())
        for kind in (WEIGHT, *MOMENTS)
    }


def next_update(ranks: list[dict[str, Any]], name: str) -> dict[str, float]:
    parts = [rank[name]["metrics"] for rank in ranks if rank[name]["info"].is_dp_leader]
    values: dict[str, float] = type(parts[0]).concat(parts).values_by_name()
    return values


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_masters_and_moments_are_the_same_bits(
    resumed: tuple[str, list[dict[str, Any]]], folder: Path, name: str
) -> None:
    want = contents(folder / f"{name}.checkpoint", folder / name)
    got = contents(folder / resumed[0] / f"{name}.checkpoint", folder / name)
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert got[key].dtype == tensor.dtype == torch.float32
        assert torch.equal(got[key], tensor), key
    rounded = want["embedding.word_embeddings.weight weight"].bfloat16().float()
    assert not torch.equal(rounded, want["embedding.word_embeddings.weight weight"])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_next_update_is_the_same(
    resumed: tuple[str, list[dict[str, Any]]], written: list[dict[str, Any]], name: str
) -> None:
    layout, ranks = resumed
    want, got = next_update(written, name), next_update(ranks, name)
    if layout == "the same":
        assert got == want
        for key, tensor in written[0][name]["weights"].items():
            assert torch.equal(ranks[0][name]["weights"][key], tensor), key
    elif MODELS[name] == "float32":  # in bfloat16 layouts round differently
        for key in ("loss/total", "loss/policy", "entropy", "grad_norm"):
            assert got[key] == pytest.approx(want[key], rel=1e-6), key
    assert got["lr"] == want["lr"]
