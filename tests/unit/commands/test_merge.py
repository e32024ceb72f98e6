"""The check of a model that `roll merge` has written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from roll.commands.merge import check_written
from roll.core.errors import CheckpointError
from tests.tiny import save_tiny_model
from tests.vision_models import make_vision_model


def test_a_model_that_reads_pictures_passes_the_check(tmp_path: Path) -> None:
    make_vision_model("qwen2_vl").save_pretrained(tmp_path)
    check_written(tmp_path, trust_remote_code=False)


def test_language_models_and_reward_models_pass_as_what_they_are(tmp_path: Path) -> None:
    writes = save_tiny_model(tmp_path / "writes")
    check_written(writes, trust_remote_code=False)
    scorer = AutoModelForSequenceClassification.from_pretrained(writes, num_labels=1)
    scorer.save_pretrained(tmp_path / "scores")
    check_written(tmp_path / "scores", scores=True, trust_remote_code=False)
    with pytest.raises(CheckpointError, match=r"does not load: score\.weight"):
        check_written(writes, scores=True, trust_remote_code=False)


def test_weights_that_are_missing_or_not_finite_are_named(tmp_path: Path) -> None:
    file = save_tiny_model(tmp_path) / "model.safetensors"
    whole = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({k: v for k, v in whole.items() if k != name}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"does not load: {name}"):
        check_written(tmp_path, trust_remote_code=False)
    save_file(whole | {name: whole[name] * torch.nan}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} is not finite"):
        check_written(tmp_path, trust_remote_code=False)
