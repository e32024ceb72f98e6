"""A small model with random weights, of the same family as another: for trials of a run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError
from roll.models.load import load_config

WIDTH = 64
"""Number of features of the small model's language half."""
HEAD = 32
"""Size of its heads: the smallest that vLLM computes on a CPU."""
LARGEST: Mapping[str, int] = {
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_attention_heads": WIDTH // HEAD,
    "num_key_value_heads": WIDTH // HEAD,
    "head_dim": HEAD,
    "global_head_dim": HEAD,
    "num_global_key_value_heads": 1,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    # latent attention, and the indexers of sparse attention
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": HEAD,
    "index_head_dim": 16,
    "index_n_heads": 2,
    # linear attention
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    # other inputs
    "hidden_size_per_layer_input": 16,
}
"""Key of a config -> largest value in a small model."""
VISION: Mapping[str, int] = {
    "depth": 2,
    "num_hidden_layers": 2,
    "embed_dim": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_attention_heads": 2,
}
"""The same for the half that sees."""
KINDS = ("layer_types", "mlp_layer_types", "indexer_types")
"""Keys that list the kind of each layer; a small model has a layer of each mixture of kinds."""
WEIGHTS = (
    ".bin",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".ot",
    ".pt",
    ".pth",
    ".safetensors",
    ".tflite",
)
"""Ends of the names of files that hold weights."""
_NO_WEIGHTS = shutil.ignore_patterns(*(f"*{end}" for end in WEIGHTS))


def write_shrunken(model: ModelConfig, folder: Path) -> None:
    """Write a small model with random weights into `folder`, with tokenizer, template and all other
    files of `model`, of which no weights are read or downloaded.

    Raises:
        ConfigError: `model` has no config that can be read, or no small model can be made of it.
    """
    config = load_config(model)
    torch.manual_seed(0)  # so that a trial can be repeated
    try:
        small = type(config).from_dict(shrunken_values(config.to_dict()))
        made = _new_model(small, trust_remote_code=model.trust_remote_code)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"model {model.path!r}: no small model can be made of its config: {error}"
        ) from error
    made.save_pretrained(folder)
    for path in _other_files(model):
        if path.is_dir():
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True, ignore=_NO_WEIGHTS)
        elif path.name != "config.json":
            shutil.copyfile(path, folder / path.name)


def shrunken_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json with small sizes, and as few layers as show every mixture
    of `KINDS`; vocabulary, positions, and all that is no size stay."""
    found = _language(config)
    found.pop("quantization_config", None)  # the small weights are float32
    if isinstance(config.get("text_config"), Mapping):
        found["text_config"] = _language(config["text_config"])
    if isinstance(config.get("vision_config"), Mapping):
        found["vision_config"] = _vision(config["vision_config"])
    return found


def _language(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a language model with small sizes."""
    found = _smaller(config, LARGEST)
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int):
        kept = _kept_layers(config, layers)
        found["num_hidden_layers"] = len(kept)
        for name, value in config.items():
            if isinstance(value, list) and len(value) == layers:
                found[name] = [value[layer] for layer in kept]
        own = config.get("per_layer_config")
        if isinstance(own, Mapping):
            found["per_layer_config"] = {
                str(kept.index(int(layer))): _smaller(values, LARGEST)
                for layer, values in own.items()
                if int(layer) in kept
            }
    if "qk_rope_head_dim" in config and config.get("head_dim") == config["qk_rope_head_dim"]:
        found["head_dim"] = found["qk_rope_head_dim"]  # the part of a head that knows positions
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(config.get(name), Mapping):
            found[name] = _with_sections(config[name], found)
    return found


def _kept_layers(config: Mapping[str, Any], layers: int) -> list[int]:
    """Return the indices of the layers that a small model keeps: the first of each mixture of
    kinds, and at least two."""
    kinds = [config[name] for name in KINDS if isinstance(config.get(name), list)]
    dense = config.get("first_k_dense_replace") or 0
    seen: dict[tuple[Any, ...], int] = {}
    for layer in range(layers):
        seen.setdefault((layer < dense, *(kind[layer] for kind in kinds)), layer)
    kept = sorted(seen.values())
    return sorted({*kept, *range(min(layers, 2 - len(kept) + 1))} if len(kept) < 2 else kept)


def _with_sections(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of rotary positions, whose sections have the same shares of smaller
    heads."""
    sections = rope.get("mrope_section")
    if not isinstance(sections, list):
        return dict(rope)
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    factor = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    total = int(head * factor) // 2
    scaled = [max(1, total * size // sum(sections)) for size in sections]
    scaled[0] += total - sum(scaled)
    return {**rope, "mrope_section": scaled}


def _vision(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the half that sees with small sizes."""
    found = _smaller(config, VISION)
    if "embed_dim" in config:  # then `hidden_size` is the width of the language half
        found["hidden_size"] = WIDTH
    if "out_hidden_size" in config:
        found["out_hidden_size"] = WIDTH
    if isinstance(config.get("fullatt_block_indexes"), list):
        found["fullatt_block_indexes"] = [1]
    if isinstance(config.get("deepstack_visual_indexes"), list):
        found["deepstack_visual_indexes"] = [0, 1][: len(config["deepstack_visual_indexes"])]
    return found


def _smaller(config: Mapping[str, Any], largest: Mapping[str, int]) -> dict[str, Any]:
    """Return the values, with numbers cut to what is largest."""
    return {
        name: min(value, largest[name])
        if name in largest and isinstance(value, int) and not isinstance(value, bool)
        else value
        for name, value in config.items()
    }


def _new_model(config: PreTrainedConfig, *, trust_remote_code: bool) -> PreTrainedModel:
    """Return a model with random weights, of the class that the config names; else of that of
    language models."""
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            of_config: Any = found
            named: PreTrainedModel = of_config._from_config(config, dtype=torch.float32)
            return named
    made: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, trust_remote_code=trust_remote_code
    )
    return made


def _other_files(model: ModelConfig) -> list[Path]:
    """Return what lies beside the weights: tokenizer, templates, settings of generation."""
    folder = Path(model.path).expanduser()
    if not folder.is_dir():
        without = [f"*{end}" for end in WEIGHTS]
        folder = Path(snapshot_download(model.path, ignore_patterns=without))
    return [
        path
        for path in sorted(folder.iterdir())
        if not path.name.endswith((*WEIGHTS, ".index.json")) and not path.name.startswith(".")
    ]
