"""Fields of Megatron-Core's config, made from a family's `config.json`.

The functions that make them lie beside the tables of the families. Fields hold plain values, so
that conversion needs no torch; `modeling.config` makes a Megatron-Core config from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from mcore_adapter.errors import ConfigError
from mcore_adapter.models.config import Config


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Variant of grouped-query attention in a family, used for its table and for its fields."""

    qkv_bias: bool = False
    """True if the projections to queries, keys and values have biases."""
    out_bias: bool = False
    """True if the output projection has a bias."""
    qk_norm: bool = False
    """True if queries and keys are normalised in each head."""
    gated: bool = False
    """True if every head of queries has a gate."""
    keys_as_values: bool = False
    """True if there is no projection to values, which are the keys before their norm."""


@dataclass(frozen=True, kw_only=True)
class GlobalHeads:
    """Heads of the layers without a window, where they differ from the others' (gemma4)."""

    layers: tuple[int, ...]
    width: int
    groups: int
    """Number of heads of keys."""
    keys_as_values: bool
    """True if values are the keys before their norm."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Properties of a model for which Megatron-Core's config has no field."""

    out_bias: bool = False
    """True if the output projection of attention has a bias and the MLP has none."""
    output_norms: bool = False
    """True if the outputs of attention and of the MLP are normalised before they are added."""
    wide_qk_norm: bool = False
    """True if queries and keys are normalised over all heads together."""
    query_growth: tuple[float, int] | None = None
    """Factor and length for `1 + factor * ln(1 + position // length)`, by which queries are
    multiplied; None: they are not."""
    embedding_scale: float = 1.0
    """Factor by which embeddings of tokens are multiplied, rounded to their data type."""
    logit_cap: float | None = None
    """Bound of the logits, which become `cap * tanh(logit / cap)`; None: no bound."""
    local_rope: tuple[int, ...] = ()
    """Numbers of the layers with the frequencies of `sliding_attention`."""
    global_heads: GlobalHeads | None = None
    """Heads of the other layers, in models that also normalise values and scale the output of each
    layer; None: all layers are alike."""


@dataclass(frozen=True, kw_only=True)
class Vision:
    """Properties of a model that sees: its vision tower, and positions on three axes.

    The axes are time, height and width (mRoPE, https://arxiv.org/abs/2409.12191).
    """

    tower: str
    """Model type of the tower in transformers, such as `qwen3_vl_vision`."""
    config: dict[str, Any]
    """Values under `vision_config`."""
    sections: tuple[int, int, int]
    """Number of rotary frequencies of each axis."""
    interleaved: bool
    """True if the axes take turns among the frequencies; False if each has one run of them."""
    deepstack: int
    """Number of first layers to whose output features of the tower are added (DeepStack,
    https://arxiv.org/abs/2406.04334)."""


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Arguments of Megatron-Core's config, and properties of a model for which it has no field."""

    config: dict[str, Any]
    """Arguments of Megatron-Core's config, by name."""
    latent: bool = False
    """True for multi-head latent attention."""
    rope_width: int
    """Number of dimensions of a head that can be rotated."""
    traits: Traits = field(default_factory=Traits)
    vision: Vision | None = None
    """Properties of a model that sees; None: it reads text only."""

    def but(self, **traits: Any) -> Fields:
        """Return a copy in which some traits have other values."""
        return replace(self, traits=replace(self.traits, **traits))


def with_experts(
    base: Fields,
    *,
    experts: int,
    width: int,
    topk: int,
    sparse: list[bool] | None = None,
    **more: Any,
) -> Fields:
    """Add experts to some or all layers.

    Args:
        base: fields without experts.
        experts: number of experts.
        width: number of hidden dimensions of an expert.
        topk: number of experts that each token visits.
        sparse: for each layer, whether it has experts; None: all layers have experts.
        more: further arguments of Megatron-Core's config.

    Raises:
        ConfigError: the weight of a single expert is normalised to 1, as Megatron-Core cannot.
    """
    if topk == 1 and not more.get("moe_router_pre_softmax"):
        raise ConfigError(
            "config.json: num_experts_per_tok is 1 in a model that normalises the weights of the "
            "chosen experts, which cannot be built, expected 2 or more"
        )
    layers = sparse if sparse is not None else [True] * base.config["num_layers"]
    values = {
        **base.config,
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": width,
        "moe_router_topk": topk,
        "moe_layer_freq": [int(layer) for layer in layers],
        **more,
    }
    return replace(base, config=values)


def windows(config: Config) -> dict[str, Any]:
    """Return the fields of sliding windows; empty if there are none.

    All layers have a window, or those that `layer_types` names; if that key is missing, those that
    transformers would choose. Another kind of layer raises `ConfigError`, even without windows.
    """
    kind, size = config["model_type"], config.get("sliding_window")
    # Other types, such as llama, have no windows, whatever their `config.json` says.
    if kind not in _WINDOWED:
        return {}
    everywhere = kind in ("mistral", "ministral3", "mixtral", "phi3", "qwen3_moe")
    kinds = [] if everywhere else layer_kinds(config)
    # Types without the key `use_sliding_window` always use windows.
    if not size or not config.get("use_sliding_window", True):
        return {}
    # Hugging Face counts the token itself, Megatron-Core only the tokens before it.
    found: dict[str, Any] = {"window_size": (size - 1, 0)}
    if not everywhere:
        found["window_attn_skip_freq"] = [int(kind == "sliding_attention") for kind in kinds]
    return found


def layer_kinds(config: Config) -> list[str]:
    """Return `layer_types`, or what transformers takes where the key is missing.

    Raises:
        ConfigError: a layer is of another kind than full or sliding attention.
    """
    kinds: list[str] | None = config["layer_types"]
    if kinds is None:
        return [
            "sliding_attention" if _windowed(config, layer) else "full_attention"
            for layer in range(config["num_hidden_layers"])
        ]
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ConfigError(f"config.json: layer_types {unknown} are not supported")
    return kinds


_WINDOWED = (
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "ministral3",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)
"""Model types that can have sliding windows."""


def _windowed(config: Config, layer: int) -> bool:
    """Return whether a layer has a sliding window, for configs without `layer_types`."""
    kind = config["model_type"]
    if kind == "gpt_oss":
        return layer % 2 == 0
    if kind == "gemma4_text" and layer == config["num_hidden_layers"] - 1:
        return False
    if kind in ("gemma3_text", "gemma4_text"):
        return (layer + 1) % config["sliding_window_pattern"] != 0
    if kind == "qwen2_moe":
        return layer % 2 == 0 and layer < (config["max_window_layers"] or 0)
    return layer >= (config["max_window_layers"] or 0)


class RopeParameters(dict[str, Any]):
    """Values of a config from which rotary frequencies are computed."""

    def __missing__(self, name: str) -> Any:
        """Raise `ConfigError` for a value that the rope type needs and the config lacks."""
        raise ConfigError(
            f"config.json: rope_parameters of type {self['rope_type']} lack {name}; add it"
        )


def rope_parameters(config: Config, kind: str = "full_attention") -> RopeParameters:
    """Return the values from which rotary frequencies are computed.

    They are those of `rope_scaling`, or else of `rope_parameters`. Older configs have `rope_theta`
    and `rope_scaling` instead of `rope_parameters`; `rope_local_base_freq` and no scaling for
    layers of the kind `sliding_attention`.

    Args:
        kind: kind of the layers, for models whose kinds of layers have frequencies of their own
            (gemma3).
    """
    given, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if given.keys() & {"full_attention", "sliding_attention"}:
        given = given.get(kind) or {}
    local = kind == "sliding_attention"
    found = RopeParameters(given if local else scaling or given)
    if "type" in found:
        found.setdefault("rope_type", found.pop("type"))
    found.setdefault("rope_type", "default")
    found.setdefault("rope_theta", config["rope_local_base_freq" if local else "rope_theta"])
    return found


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return yarn's scale of attention for a context that is `factor` times as long.

    It is 1 for a factor up to 1. Above, it grows with ln(factor), in proportion to `mscale`.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def expect(config: Config, name: str, *allowed: object) -> None:
    """Raise unless the value of a key is one of those that can be built.

    Raises:
        ConfigError: the value is not one of `allowed`, or the key is missing and has no default.
    """
    found = config[name]
    if found not in allowed:
        raise ConfigError(
            f"config.json: {name} is {found!r}, which cannot be built; expected one of {allowed}"
        )
