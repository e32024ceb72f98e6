"""Configs and models of transformers by model type, whether the models see or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 16,
        "intermediate_size": 20,
        "out_hidden_size": 32,
        "window_size": 8,  # two merged patches
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "hidden_size": 16,
        "intermediate_size": 20,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 2],
    },
}
TOWERS["qwen3_vl_moe"] = TOWERS["qwen3_vl"]
PATCHES = {
    "depth": 3,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 2,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
"""Values of every tower: a patch is 24 numbers, and a token is four patches."""


SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Types of checkpoints whose class is not in transformers: that of the same model."""
NEEDED: dict[str, dict[str, Any]] = {"gemma4_text": {"hidden_size_per_layer_input": 0}}
"""Without these keys, the model that transformers builds is not supported."""


def in_transformers(kind: str) -> str:
    """The type that transformers knows the model by."""
    return SAME_AS.get(kind, kind)


def default(kind: str) -> dict[str, Any]:
    """The smallest `config.json` of a supported model."""
    return {"model_type": kind, **NEEDED.get(kind, {})}


def name_type(folder: Path, kind: str) -> None:
    """Lets a folder that transformers wrote say its own type, as published ones do."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": kind}))


def config_of(kind: str, values: dict[str, Any]) -> PreTrainedConfig:
    """The config with these values; of a model that sees, they are of the language model."""
    if kind not in TOWERS:
        return AutoConfig.for_model(in_transformers(kind), **values)
    tower = {"initializer_range": values.get("initializer_range", 0.02), **PATCHES, **TOWERS[kind]}
    text = {k: v for k, v in values.items() if k not in ("tie_word_embeddings", "vision_config")}
    width = "hidden_size" if kind == "qwen2_vl" else "out_hidden_size"
    tower |= {width: values["hidden_size"], **values.get("vision_config", {})}
    return AutoConfig.for_model(
        kind,
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=values.get("tie_word_embeddings", False),
    )


def language_class(kind: str) -> Any:
    """The class of configs that has the keys of the language model."""
    whole = CONFIG_MAPPING[in_transformers(kind)]
    return whole.sub_configs["text_config"] if kind in TOWERS else whole


def model_of(config: PreTrainedConfig, **more: Any) -> PreTrainedModel:
    """A new model of transformers."""
    model = _class(config).from_config(config, **more)
    assert isinstance(model, PreTrainedModel)
    return model


def loaded(folder: Path, **more: Any) -> PreTrainedModel:
    """The model in a folder, as transformers loads it, or would if it knew the type (`SAME_AS`)."""
    values = json.loads((folder / "config.json").read_text())
    if values["model_type"] in SAME_AS:
        kind = SAME_AS[values.pop("model_type")]
        more["config"] = config = CONFIG_MAPPING[kind].from_dict(values)
    else:
        config = AutoConfig.from_pretrained(folder)
    model = _class(config).from_pretrained(folder, **more)
    assert isinstance(model, PreTrainedModel)
    return model


def _class(config: PreTrainedConfig) -> Any:
    return AutoModelForImageTextToText if config.model_type in TOWERS else AutoModelForCausalLM
