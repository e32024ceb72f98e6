"""Content of a `config.json`, checked and completed with defaults for tables and fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_adapter.errors import ConfigError
from mcore_adapter.models.defaults import DEFAULTS
from mcore_adapter.models.defaults.common import COMMON
from mcore_adapter.models.vision.nested import SEES, flattened

_COUNTS = {
    "hidden_size": 1,
    "intermediate_size": 1,
    "num_hidden_layers": 0,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 1,
    "vocab_size": 1,
    "max_position_embeddings": 1,
    "sliding_window": 0,
    "max_window_layers": 0,
    "num_experts": 0,
    "num_local_experts": 0,
    "n_routed_experts": 0,
    "n_shared_experts": 0,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 1,
    "shared_expert_intermediate_size": 0,
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 1,
    "q_lora_rank": 1,
    "qk_rope_head_dim": 1,
    "qk_nope_head_dim": 1,
    "v_head_dim": 1,
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
    "linear_conv_kernel_dim": 1,
    "linear_key_head_dim": 1,
    "linear_value_head_dim": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "full_attention_interval": 1,
    "sliding_window_pattern": 1,
    "rotary_dim": 2,
    "global_head_dim": 1,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "index_topk": 1,
    "index_head_dim": 1,
    "index_n_heads": 1,
    "index_topk_freq": 0,
    "index_skip_topk_offset": 0,
    "pad_token_id": -1,
}
"""Least value of each key that holds a count."""
_FLAGS = (
    "tie_word_embeddings",
    "attention_bias",
    "attention_out_bias",
    "mlp_bias",
    "qkv_bias",
    "use_qk_norm",
    "use_sliding_window",
    "norm_topk_prob",
    "rope_interleave",
    "attention_k_eq_v",
    "enable_moe_block",
)
"""Keys with true or false; null is allowed and means false."""
_NUMBERS = (
    "rms_norm_eps",
    "initializer_range",
    "routed_scaling_factor",
    "swiglu_alpha",
    "swiglu_limit",
    "rope_theta",
    "partial_rotary_factor",
    "rope_local_base_freq",
    "query_pre_attn_scalar",
    "final_logit_softcapping",
)
"""Keys with any number."""
_NULL_SAYS_DEFAULT = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
"""Keys for which null means the default value."""
_NULL_SAYS_NONE = (
    "head_dim",
    "num_key_value_heads",
    "q_lora_rank",
    "sliding_window",
    "layer_types",
    "mlp_only_layers",
    "max_window_layers",
    "n_group",
    "topk_group",
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "moe_intermediate_size",
    "num_experts",
    "mlp_layer_types",
    "indexer_types",
    "index_topk_pattern",
    "rotary_dim",
    "num_global_key_value_heads",
    "per_layer_config",
    "final_logit_softcapping",
    "pad_token_id",
)
"""Keys for which null is a value of its own."""
_LISTS_OF_KINDS = ("layer_types", "mlp_layer_types", "indexer_types")
"""Keys with a list of texts, one for each layer."""
_MOST = {"num_hidden_layers": 10_000, "num_nextn_predict_layers": 100, "num_mtp_layers": 100}
"""Largest value of some counts."""
_MOST_EXPERTS = 1_000_000
"""Largest number of experts in all layers together."""
_EXPERT_COUNT_KEYS = {
    "mixtral": ("num_local_experts", "num_experts"),
    "gpt_oss": ("num_local_experts", "num_experts"),
    "qwen2_moe": ("num_experts", "num_local_experts"),
    "qwen3_moe": ("num_experts", "num_local_experts"),
    "qwen3_next": ("num_experts", "num_local_experts"),
    "qwen3_vl_moe": ("num_experts", "num_local_experts"),
    "qwen3_5_moe_text": ("num_experts", "num_local_experts"),
    "minimax_m2": ("num_local_experts", "num_experts"),
    "deepseek_v3": ("n_routed_experts", "num_local_experts"),
    "kimi_k2": ("n_routed_experts", "num_local_experts"),
    "glm4_moe_lite": ("n_routed_experts", "num_local_experts"),
    "glm_moe_dsa": ("n_routed_experts", "num_local_experts"),
    "glm4_moe": ("n_routed_experts", "num_local_experts"),
}
"""Two keys for the number of routed experts: the model type's own, and another one in use."""


class Size(int):
    """Count that records from which keys of `config.json` it is computed."""

    label: str
    """Name of the key, or an expression of several, for error messages."""

    def __new__(cls, value: int, label: str = "") -> Size:
        made = super().__new__(cls, value)
        made.label = label or str(int(value))
        return made

    def __add__(self, other: int) -> Size:
        return Size(int(self) + int(other), f"{self.label} + {_label(other)}")

    def __mul__(self, other: int) -> Size:
        return Size(int(self) * int(other), f"{_factor(self)} * {_factor(other)}")

    def __rmul__(self, other: int) -> Size:
        return Size(int(self) * int(other), f"{_factor(other)} * {_factor(self)}")


class Config(dict[str, Any]):
    """Content of a `config.json`. Missing keys have the defaults of transformers."""

    def __missing__(self, name: str) -> Any:
        """Raise `ConfigError` for a key that has neither a value nor a default."""
        raise ConfigError(
            f"config.json lacks {name}, and there is no default for it in a "
            f"{self.get('model_type')}; add it"
        )

    def count(self, name: str) -> Size:
        """Return the count under a key.

        Raises:
            ConfigError: the key is missing, or its value is null.
        """
        found = self[name]
        if found is None:
            raise ConfigError(f"config.json: {name} is null, expected a number")
        return Size(found, name)

    def flag(self, name: str) -> bool:
        """Return a flag: False if it is null, or if it is missing and has no default."""
        return bool(self.get(name))

    def but(self, **changed: Any) -> Config:
        """Return a copy with other values."""
        return Config({**self, **changed})


def completed(config: Mapping[str, Any]) -> Config:
    """Check the content of a `config.json`, and complete it with the defaults of its model type.

    A `Config` is returned as it is. The keys of a language model beside a vision tower lie at the
    top of the result, whether they are nested in the file or not.

    Raises:
        ConfigError: a value has the wrong type or is out of range, or two keys contradict each
            other.
    """
    if isinstance(config, Config):
        return config
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in SEES:
        config = flattened(kind, config)
    given = {k: v for k, v in config.items() if v is not None or k not in _NULL_SAYS_DEFAULT}
    for name, value in given.items():
        _check(name, value)
    defaults = DEFAULTS.get(str(kind), COMMON)
    if "num_mtp_layers" in given:
        given.setdefault("num_nextn_predict_layers", given["num_mtp_layers"])
    if str(kind) in _EXPERT_COUNT_KEYS:
        _resolve_alias(given, *_EXPERT_COUNT_KEYS[str(kind)])
    made = Config({**defaults, **given})
    _check_layers(made)
    _check_experts(made)
    return made


def _resolve_alias(given: dict[str, Any], name: str, other: str) -> None:
    """Copy the value of `other` to `name`; raise `ConfigError` if both are given and differ."""
    if other not in given:
        return
    if given.setdefault(name, given[other]) != given[other]:
        raise ConfigError(
            f"config.json: {name} is {given[name]} and {other} is {given[other]}, which mean the "
            "same; leave the wrong one out"
        )


def _check(name: str, value: Any) -> None:
    """Raise `ConfigError` unless a value has the type of its key and is in the key's range."""
    if value is None and (name in _NULL_SAYS_NONE or name in _FLAGS):
        return
    expected = None
    if name in _COUNTS:
        least, most = _COUNTS[name], _MOST.get(name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or value < least or (most is not None and value > most):
            expected = f"a whole number from {least}" + (f" to {most}" if most else "")
    elif name in _FLAGS and not isinstance(value, bool):
        expected = "true or false"
    elif name in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
        expected = "a number"
    elif name in ("rope_parameters", "rope_scaling", "per_layer_config") and not isinstance(
        value, dict
    ):
        expected = "an object"
    elif name in ("hidden_act", "model_type") and not isinstance(value, str):
        expected = "a text"
    elif name in _LISTS_OF_KINDS and not _is_list(value, str):
        expected = "a list of texts"
    elif name == "mlp_only_layers" and not _is_list(value, int):
        expected = "a list of whole numbers"
    if expected is not None:
        raise ConfigError(f"config.json: {name} is {_short(value)}, expected {expected}")


def _check_layers(config: Config) -> None:
    """Raise `ConfigError` unless each list of kinds that is given has one entry per layer."""
    for name in _LISTS_OF_KINDS:
        kinds = config.get(name)
        if kinds is not None and len(kinds) != config["num_hidden_layers"]:
            named = ", ".join(sorted(set(kinds)))
            raise ConfigError(
                f"config.json: {name} names {len(kinds)} layers ({named}), num_hidden_layers is"
                f" {config['num_hidden_layers']}"
            )


def _check_experts(config: Config) -> None:
    """Raise `ConfigError` if there are more than `_MOST_EXPERTS` experts in all layers together.

    Tables have rows for every expert of every layer, and would become too large.
    """
    layers = config.get("num_hidden_layers", 0)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = config.get(name) or 0
        if layers * experts > _MOST_EXPERTS:
            raise ConfigError(
                f"config.json: {name} {experts} times num_hidden_layers {layers} is more than "
                f"{_MOST_EXPERTS}; is it right?"
            )


def _is_list(value: object, kind: type) -> bool:
    """Return True for a list of values of the class `kind`; true and false are no numbers here."""
    return isinstance(value, list) and all(
        isinstance(each, kind) and not isinstance(each, bool) for each in value
    )


def _short(value: object) -> str:
    """Return the value as Python text, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _label(value: int) -> str:
    """Return the label of a `Size`, or the digits of any other number."""
    return value.label if isinstance(value, Size) else str(value)


def _factor(value: int) -> str:
    """Return the label of a number, in parentheses if it is a sum."""
    label = _label(value)
    return f"({label})" if " + " in label else label
