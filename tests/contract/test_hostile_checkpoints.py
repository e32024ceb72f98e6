"""No file of a run's checkpoint can run code, whichever backend reads it."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import DeepspeedConfig, Fsdp2Config, MegatronConfig
from roll.core.errors import CheckpointError, RollError
from roll.core.types import WorkerSpec
from roll.strategy.fsdp2.files import INDEX
from roll.strategy.interfaces import TrainStrategy
from tests.contract.backends import TrainBackend, TrainConfig
from tests.contract.ranks import run_ranks
from tests.contract.train_job import ADAM, EntropyBonusLoss, exported, rows_of, train_batch
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
    (bad := folder / "bad").mkdir()
    (bad / "meta.json").write_text("[1]")  # JSON, but no object
    try:
        strategy.load(bad)
    except RollError as error:
        said["list"] = str(error)
    shutil.rmtree(bad)
    said["whole"] = _without_a_shard(strategy, good, bad)
    if kind == "fsdp2":
        said["huge"] = _with_a_huge_state(strategy, good, bad)
    old = json.loads((good / "meta.json").read_text()) | {"format": 1}
    (good / "meta.json").write_text(json.dumps(old))
    try:
        strategy.load(good)
    except RollError as error:
        said["old"] = str(error)
    return {"files": files, "said": said}


def _with_a_huge_state(strategy: TrainStrategy[Any], good: Path, bad: Path) -> str:
    """Load a checkpoint whose index asks for a terabyte of optimizer state; return the error."""
    shutil.copytree(good, bad)
    index = json.loads((bad / INDEX).read_text())
    name = next(key for key in index["tensors"] if key.endswith(".exp_avg"))
    index["tensors"][name]["shape"] = [1 << 38]
    (bad / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="is damaged") as error:
        strategy.load(bad)
    shutil.rmtree(bad)
    return str(error.value)


def _without_a_shard(strategy: TrainStrategy[Any], good: Path, bad: Path) -> str:
    """Load a checkpoint of which a file with tensors is missing; return what the next update of the
    trainer says of it, which must have lost nothing."""
    before, after = bad.with_name("before"), bad.with_name("after")
    strategy.save(before)
    shutil.copytree(good, bad)
    largest = max((p for p in bad.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.unlink()
    with pytest.raises(CheckpointError, match=largest.name):
        strategy.load(bad)
    strategy.train(rows_of(strategy, train_batch()), EntropyBonusLoss())
    changed = exported(strategy)
    strategy.load(before)
    strategy.train(rows_of(strategy, train_batch()), EntropyBonusLoss())
    for path in (bad, before, after):
        shutil.rmtree(path, ignore_errors=True)
    equal = all(torch.equal(changed[name], one) for name, one in exported(strategy).items())
    return "nothing changed" if equal else "the optimizer lost its state"


@pytest.mark.slow
@pytest.mark.parametrize("kind", BACKENDS)
def test_no_file_of_a_checkpoint_runs_code_and_old_ones_are_refused(
    kind: str, tmp_path: Path
) -> None:
    assert_works(tmp_path / "probe")
    save_tiny_model(tmp_path / "model")
    [result] = run_ranks(1, partial(attack, kind), tmp_path / "1", timeout_s=600)
    said = result["said"]
    assert {"meta.json", "rng_00000.json"} <= set(result["files"])
    assert not [name for name in result["files"] if name.endswith((".pt", ".pkl", ".metadata"))]
    for name in result["files"]:
        for how in ("pickle", "torch"):
            assert said[f"{name} {how}"] != "loaded", name
            assert "/bad" in said[f"{name} {how}"], "the checkpoint is named"
    for name in OLD_FILES:
        assert said[f"{name} pickle"] == "loaded", "nobody reads it"
    assert "meta.json is damaged" in said["list"]
    assert said["whole"] == "nothing changed"
    assert kind != "fsdp2" or "exp_avg has the shape (274877906944,)" in said["huge"]
    assert "has format 1" in said["old"]
    assert "older ones hold pickles" in said["old"]
