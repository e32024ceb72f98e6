"""No file of a run's checkpoint can run code, whichever backend reads it."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import DeepspeedConfig, Fsdp2Config, MegatronConfig
from roll.core.errors import RollError
from roll.core.types import WorkerSpec
from tests.contract.backends import TrainBackend, TrainConfig
from tests.contract.ranks import run_ranks
from tests.contract.train_job import ADAM, EntropyBonusLoss, rows_of, train_batch
from tests.hostile import assert_works, pickled, torch_saved
from tests.tiny import save_tiny_model

BACKENDS: dict[str, TrainConfig] = {
    "fsdp2": Fsdp2Config,
    "deepspeed": DeepspeedConfig,
    "megatron": MegatronConfig,
}
OLD_FILES = (".metadata", "rng_00000.pt")
"""Pickles that earlier versions read."""


def attack(kind: str, spec: WorkerSpec, folder: Path) -> dict[str, Any]:
    """Replace each file of a checkpoint in turn, and add those of old; what the loads say."""
    model = ModelConfig(path=str(folder.parent / "model"))
    strategy = TrainBackend("", BACKENDS[kind], ()).build(
        spec, model, optimizer=ADAM, total_steps=4
    )
    strategy.train(rows_of(strategy, train_batch()), EntropyBonusLoss())
    good = folder / "good"
    strategy.save(good)
    files = sorted(str(p.relative_to(good)) for p in good.rglob("*") if p.is_file())
    said: dict[str, str] = {}
    mark = folder / "mark"
    for name in [*files, *OLD_FILES]:
        for how in ("pickle", "torch"):
            bad = folder / "bad"
            shutil.copytree(good, bad)
            if how == "pickle":
                (bad / name).write_bytes(pickled(mark))
            else:
                torch_saved(mark, bad / name)
            try:
                strategy.load(bad)
                said[f"{name} {how}"] = "loaded"
            except RollError as error:
                said[f"{name} {how}"] = str(error)
            assert not mark.exists(), f"{name} ran code"
            shutil.rmtree(bad)
    old = json.loads((good / "meta.json").read_text()) | {"format": 1}
    (good / "meta.json").write_text(json.dumps(old))
    try:
        strategy.load(good)
    except RollError as error:
        said["old"] = str(error)
    return {"files": files, "said": said}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BACKENDS)
def test_no_file_of_a_checkpoint_runs_code_and_old_ones_are_refused(
    kind: str, tmp_path: Path
) -> None:
    assert_works(tmp_path / "probe")
    save_tiny_model(tmp_path / "model")
    [result] = run_ranks(1, partial(attack, kind), tmp_path / "1", timeout_s=240)
    said = result["said"]
    assert {"meta.json", "rng_00000.json"} <= set(result["files"])
    assert not [name for name in result["files"] if name.endswith((".pt", ".pkl", ".metadata"))]
    for name in result["files"]:
        for how in ("pickle", "torch"):
            assert said[f"{name} {how}"] != "loaded", name
            assert "/bad" in said[f"{name} {how}"], "the checkpoint is named"
    for name in OLD_FILES:
        assert said[f"{name} pickle"] == "loaded", "nobody reads it"
    assert "has format 1" in said["old"]
    assert "older ones hold pickles" in said["old"]
