"""What an engine knows of the checkpoint that it was started from, and holds a push to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from roll.config.sections.model import ModelConfig
from roll.core.errors import EngineError, WeightSyncError
from roll.strategy.hf_folder import read_checkpoint
from roll.weight_sync.checks import check_shapes
from roll.weight_sync.manifest import Manifest
from tests.families import save

MORE = {
    "llama": ["model.layers.1.self_attn.rotary_emb.inv_freq"],
    "deepseek_v3": ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.0.up_proj.weight"],
    "glm4_moe": ["model.layers.2.enorm.weight"],
    "qwen3_next": ["mtp.fc.weight", "mtp.layers.0.mlp.experts.0.down_proj.weight"],
}
"""What checkpoints of these families hold, and no training backend."""


def checkpoint(folder: Path, name: str, more: list[str], **settings: Any) -> tuple[Path, Manifest]:
    """A folder with further tensors, and a push without them."""
    save(folder, name)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    manifest = Manifest.of(tensors.items())
    save_file({**tensors, **{key: torch.ones(2) for key in more}}, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder, manifest


def check(folder: Path, manifest: Manifest) -> None:
    expected = read_checkpoint(ModelConfig(path=str(folder)))
    check_shapes(manifest, expected.shapes, optional=expected.optional)


@pytest.mark.parametrize("name", MORE)
def test_what_no_trainer_has_may_stay_away(tmp_path: Path, name: str) -> None:
    check(*checkpoint(tmp_path, name, MORE[name], num_nextn_predict_layers=1))


@pytest.mark.parametrize(
    ("name", "more", "further"),
    [
        ("llama", "model.layers.2.mlp.up_proj.weight", 0),
        ("deepseek_v3", "model.layers.3.eh_proj.weight", 1),
        ("deepseek_v3", "model.layers.1.strange.weight", 1),
        ("qwen3", "model.extra.weight", 1),
    ],
)
def test_what_is_not_known_must_come(tmp_path: Path, name: str, more: str, further: int) -> None:
    pushed = checkpoint(tmp_path, name, [more], num_nextn_predict_layers=further)
    with pytest.raises(WeightSyncError, match=f"1 tensors are missing, e.g. '{more}'"):
        check(*pushed)


def test_files_that_transformers_does_not_load_are_nothing_to_push(tmp_path: Path) -> None:
    """As a vendor's own layout beside them, or what an earlier save has left."""
    folder, manifest = checkpoint(tmp_path, "llama", [])
    save_file({"layers.0.wq.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    check(folder, manifest)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(["a", "b"], "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check(folder, manifest)


@pytest.mark.parametrize(
    "content",
    [b"", b"short", b"version https://git-lfs.github.com/spec/v1\n", bytes(8), b"\x08" + bytes(20)],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    """Among them the pointer that Git leaves where Git LFS is not installed."""
    save(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(EngineError, match=f"{file} is no safetensors file, or damaged"):
        read_checkpoint(ModelConfig(path=str(tmp_path)))
