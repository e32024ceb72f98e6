"""Layers that predict further tokens (MTP) in run files: `roll check` refuses models that have
none, and `roll try` tries without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from roll.commands.preflight import inspect
from roll.commands.try_run.small_run import small_run
from roll.config import load_config
from roll.config.sections.roles import Role
from roll.config.sections.strategy import MegatronConfig
from tests.convert.tiny_models import COMMON, MODELS
from tests.runs import write_task

GLM = {**COMMON, **MODELS["glm4_moe"], "num_nextn_predict_layers": 1, "hidden_act": "silu"}
TIED = {**GLM, "tie_word_embeddings": True}
THERE, ELSEWHERE = "model.layers.4.eh_proj.weight", "model.layers.3.mlp.gate.weight"


@pytest.mark.parametrize(
    ("pp", "model", "stored", "said"),
    [
        (1, GLM, THERE, None),
        (2, GLM, THERE, None),
        (1, TIED, THERE, None),
        (2, TIED, THERE, "cannot also be the tied output layer's; pp is 2, say 1"),
        (1, GLM, ELSEWHERE, "have no layers that predict further tokens"),
        (1, {**GLM, "num_nextn_predict_layers": 0}, ELSEWHERE, "this glm4_moe has no layers"),
        (1, {}, ELSEWHERE, "this qwen3 has no layers that predict further tokens"),
    ],
)
def test_models_without_such_layers_are_refused_before_anything_starts(
    tmp_path: Path, pp: int, model: dict[str, object], stored: str, said: str | None
) -> None:
    file = write_task(tmp_path)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(model or json.loads(path.read_text())))
    tensors = {stored: torch.zeros(1), "model.norm.weight": torch.zeros(1)}
    save_file(tensors, path.with_name("model.safetensors"))
    strategy = f"{{kind: megatron, pp: {pp}, mtp_loss_weight: 0.1}}"
    overrides = [f"actor_train.strategy={strategy}", f"pools.all=0-{pp - 1}"]
    loaded = load_config(file, ["cluster.platform=cpu", *overrides])
    told = [str(finding.error) for finding in inspect(loaded, {})]
    found = [error for error in told if "mtp_loss_weight" in error]
    assert len(found) == (said is not None), found
    assert all(str(said) in error for error in found), found


def test_a_small_model_has_no_such_layers(tmp_path: Path) -> None:
    strategy = "actor_train.strategy={kind: megatron, mtp_loss_weight: 0.1, mtp_detached: false}"
    config = load_config(write_task(tmp_path), [strategy]).config
    small = small_run(config, tmp_path / "o", lambda model: tmp_path / "small", steps=2)
    assert small.config.trained[Role.ACTOR_TRAIN].strategy == MegatronConfig()
    assert "layers that predict further tokens (mtp_loss_weight)" in small.told
