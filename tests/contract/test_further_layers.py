"""Layers that predict further tokens (MTP) and are not trained: a saved folder has them."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_adapter.convert.conversion_plan import tasks
from mcore_adapter.convert.shapes import hf_shapes
from mcore_adapter.load import read_config
from mcore_adapter.models import table_of
from mcore_adapter.parallel_sizes import ParallelSizes
from roll.commands.merge import check_written
from roll.config.sections.model import ModelConfig
from roll.config.sections.optimizers.kinds import AdamWConfig
from roll.core.types import WorkerSpec
from roll.strategy.further_layers import further_layers
from roll.strategy.training.group import GroupMembership
from roll.weight_sync.manifest import Manifest
from tests.contract.backends import TRAIN_BACKENDS
from tests.contract.ranks import run_ranks
from tests.contract.train_job import EntropyBonusLoss, rows_of, train_batch
from tests.families import config_of, save
from tests.turns import in_groups

FAMILIES = (
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
)
"""Those for which mcore_adapter knows the layers."""
BACKENDS = {
    "fsdp2": ("deepseek_v3", "qwen3_next"),
    "deepspeed-zero3": ("glm4_moe", "qwen3_5"),
    "megatron-pp2": FAMILIES,
}
"""What is trained on each; transformers knows none of the layers, so there two stand for all."""


def save_further(folder: Path, name: str) -> Path:
    """A checkpoint with one further layer; what it shares with the model is stored again."""
    file = save(folder, name) / "model.safetensors"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    table, tensors = table_of(read_config(folder)), load_file(file)
    further = {
        ref.name: torch.randn(shape, dtype=torch.bfloat16)
        for task in tasks(table, ParallelSizes())
        if task.param.optional
        for ref, shape in zip(task.hf, hf_shapes(task, table), strict=True)
    }
    assert further
    copies = {other: tensors[of].clone() for other, of in table.repeats.items()}
    save_file({**tensors, **further, **copies}, file, metadata={"format": "pt"})
    return folder


def job(spec: WorkerSpec, folder: Path, backend: str) -> dict[str, Any]:
    """What an update makes of each family's tensors; the trained model is saved."""
    made = next(each for each in TRAIN_BACKENDS if each.name == backend)
    group = GroupMembership(spec)
    results: dict[str, Any] = {}
    for name in BACKENDS[backend]:
        trainer = made.build(
            spec, config_of(folder.parent / name, name), optimizer=AdamWConfig(lr=1e-2)
        )
        trainer.train(rows_of(trainer, train_batch()), EntropyBonusLoss())
        results[name] = {key: tensor.clone() for key, tensor in trainer.export_weights()}
        trainer.save_hf(folder / name)
        trainer.close()
    group.leave()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("backend", in_groups(list(BACKENDS)))
def test_a_saved_folder_has_them_as_the_checkpoint_has_them(tmp_path: Path, backend: str) -> None:
    for name in BACKENDS[backend]:
        save_further(tmp_path / name, name)
    trained = run_ranks(2, partial(job, backend=backend), tmp_path / "job", timeout_s=300)[0]
    for name in BACKENDS[backend]:
        before = load_file(tmp_path / name / "model.safetensors")
        after = load_file(tmp_path / "job" / name / "model.safetensors")
        assert after.keys() == before.keys(), name
        changed = [key for key in before if not _same(after[key], before[key])]
        repeats = table_of(read_config(tmp_path / name)).repeats
        assert set(changed) <= trained[name].keys() | repeats.keys(), name
        assert "model.embed_tokens.weight" in changed, name
        for key, value in trained[name].items():
            assert _same(after[key], value), (name, key)
        for key, of in repeats.items():
            assert _same(after[key], after[of]), (name, key)
        check_written(tmp_path / "job" / name, trust_remote_code=False)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def test_layers_that_cannot_be_taken_over_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_further(tmp_path, "glm4_moe")
    file, config = folder / "model.safetensors", folder / "config.json"
    before, told = load_file(file), config.read_text()
    stored = Manifest.of((key, value) for key, value in before.items() if ".layers.2." not in key)

    def said(**overrides: Any) -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = further_layers(
                ModelConfig(path=str(folder), overrides=overrides), stored.tensors
            )
        assert bool(found.metas) != bool(caplog.messages)
        return caplog.text

    assert said() == ""
    assert "model.overrides makes model.layers.2." in said(num_hidden_layers=1)
    config.write_text(json.dumps({**json.loads(told), "quantization_config": {"bits": 8}}))
    assert "they are quantised" in said()
    config.write_text(told)
    torch.save(before, folder / "pytorch_model.bin")
    file.unlink()
    assert "they are no safetensors files" in said()


def test_a_copy_that_differs_from_what_it_should_repeat_is_taken_over(tmp_path: Path) -> None:
    file = save_further(tmp_path, "glm4_moe") / "model.safetensors"
    before = load_file(file)
    own = before["model.layers.2.embed_tokens.weight"].clone()
    own[-1] += 1
    save_file({**before, "model.layers.2.embed_tokens.weight": own}, file)
    trained = {key: value + 1 for key, value in before.items() if ".layers.2." not in key}
    further = further_layers(ModelConfig(path=str(tmp_path)), Manifest.of(trained.items()).tensors)
    after = dict(further.added_to(trained.items()))
    assert after.keys() == before.keys()
    assert _same(after["model.layers.2.embed_tokens.weight"], own)
    assert _same(after["model.layers.2.shared_head.head.weight"], before["lm_head.weight"] + 1)
