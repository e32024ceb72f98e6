"""What vLLM is told of configs that transformers has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from roll.core.errors import ConfigError
from roll.strategy.vllm.config_keys import missing_keys
from tests.convert.tiny_models import COMMON, MODELS


def written(folder: Path, name: str, **values: Any) -> PreTrainedConfig:
    """Read back, as vLLM would."""
    made = {**COMMON, **MODELS[name], **values}
    AutoConfig.for_model(made.pop("model_type"), **made).save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    assert isinstance(config, PreTrainedConfig)
    return config


def test_keys_of_other_names_are_told(tmp_path: Path) -> None:
    dense_first = {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}
    found = missing_keys(written(tmp_path / "glm", "glm4_moe_lite", **dense_first))
    assert found == {"first_k_dense_replace": 2}
    found = missing_keys(written(tmp_path / "minimax", "minimax_m2"))
    assert found["rotary_dim"] == 6  # half of a head
    assert found["use_routing_bias"]
    found = missing_keys(written(tmp_path / "ministral", "ministral3"))
    growth = {"beta": 0.1, "original_max_position_embeddings": 4}
    assert found == {"llama_4_scaling": growth}
    assert missing_keys(written(tmp_path / "phi", "phi3")) == {}


def test_what_a_published_config_says_is_left_alone(tmp_path: Path) -> None:
    told = {"rotary_dim": 4, "scoring_func": "sigmoid", "use_routing_bias": True}
    assert missing_keys(written(tmp_path, "minimax_m2", **told)) == {}


def test_dense_layers_behind_sparse_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="whose dense layers are the first ones"):
        missing_keys(written(tmp_path, "glm4_moe_lite"))
