"""Numbers of a model that its memory depends on, from its folder. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from roll.commands.checks.shared_models import NUMBER_OF_EXPERTS
from roll.commands.memory.weight_files import INDEX, SINGLE, read_header
from roll.config.errors import ConfigError
from roll.config.frozen import frozen_names
from roll.config.sections.model import LoraConfig, ModelConfig
from roll.core.hub import has_hub_form
from roll.models.parts.further import is_copy, is_further_name


@dataclass(frozen=True, slots=True)
class FurtherLayers:
    """Layers of a model that predict further tokens (MTP), without what they share with it."""

    layers: int = 0
    elements: int = 0
    experts: int = 0
    """Elements of their routed experts, which are part of `elements`."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Numbers of elements of a model's parameters, and its widths."""

    total: int
    """Elements of all parameters but those of `further`; a head that is the embedding counts
    once."""
    experts: int
    """Elements of all routed experts, which are part of `total`."""
    layer: int
    """Elements of the largest layer."""
    root: int
    """Elements outside of the layers: embedding, head, last norm."""
    head: int
    """Elements of the output head."""
    layers: int
    hidden: int
    queries: int
    """Width of all query heads together."""
    keys: int
    """Width of all key heads together; that of the values is the same."""
    heads: int
    feed_forward: int
    """Width of the feed-forward part of a token: that of all experts that it is given to."""
    vocab: int
    head_norms: bool
    """True if queries and keys are normalised head by head."""
    latent: int = 0
    """Elements that an engine caches of a token in a layer of latent attention, in place of keys
    and values; 0: it is not latent."""
    layer_experts: int = 0
    """Elements of the routed experts of a layer, which are part of `layer`; 0 if the largest layer
    has none."""
    choices: int = 1
    """Number of routed experts that a token is given to."""
    quantised_bytes: int | None = None
    """Bytes of all weights in files that are quantised; None: they are not."""
    further: FurtherLayers = FurtherLayers()

    def with_score_head(self) -> ModelSizes:
        """Return the sizes of a critic or a reward model, which has one output per token in place
        of logits."""
        output = self.root - self.head - self.hidden  # 0 if it is the embedding
        more = self.hidden - output
        return replace(
            self, total=self.total + more, root=self.root + more, head=self.hidden, vocab=1
        )

    def adapter(self, lora: LoraConfig) -> int:
        """Return about how many elements an adapter of all linear layers has: of each matrix the
        rank times the sum of its widths."""
        attention = 4 * self.hidden + 2 * self.queries + 2 * self.keys
        feed_forward = 0 if self.experts else 3 * (self.hidden + self.feed_forward)
        return lora.rank * self.layers * (attention + feed_forward)


def sizes_of(model: ModelConfig, *, scores: bool = False) -> ModelSizes | None:
    """Return the sizes of a model; None if its config.json is not on this machine, or describes an
    architecture whose parameters are not counted here.

    The total is that of the safetensors files, if they are here; else it is computed. Tensors of
    quantised files hold several elements in one, so it is always computed there, and None is
    returned if the files are not here.

    Args:
        scores: the model has one output per token, whatever its files have.
    """
    folder = _folder(model.path)
    if folder is None or not (folder / "config.json").is_file():
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        counted = count(config)
        counted = counted.with_score_head() if scores else counted
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        return None
    stored = _stored(folder)
    if _is_quantised(config):
        if stored is None:
            return None
        return replace(counted, quantised_bytes=sum(one.size_bytes for one in stored.values()))
    if stored is None:
        return counted
    kept = [n for n in stored if not (scores and n.endswith("lm_head.weight"))]
    further = {name: stored[name].elements for name in kept if _is_further(name, config)}
    total = sum(stored[name].elements for name in kept) - sum(further.values())
    return replace(counted, total=total, further=_further_of(further, counted.further.layers))


def _is_further(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a tensor belongs to a layer that predicts further tokens."""
    told = _told(config)
    layers, further = told["num_hidden_layers"], told.get("num_nextn_predict_layers") or 0
    return is_further_name(name, int(layers), int(further))


def _further_of(stored: Mapping[str, int], layers: int) -> FurtherLayers:
    """Return the sizes of the layers of which these are the tensors in the files.

    Args:
        layers: their number, as far as the config says it.
    """
    own = {name: elements for name, elements in stored.items() if not is_copy(name)}
    if not own:
        return FurtherLayers()
    experts = sum(elements for name, elements in own.items() if ".experts." in name)
    return FurtherLayers(max(1, layers), sum(own.values()), experts)


def _told(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json, those of a language model in it first."""
    return {**config, **(config.get("text_config") or {})}


def _is_quantised(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of weights that are quantised already."""
    text = config.get("text_config") or {}
    return any(part.get("quantization_config") for part in (config, text))


@dataclass(frozen=True, slots=True)
class Learned:
    """Part of a model that training changes."""

    elements: int
    """Number of elements that are trained."""
    head: bool
    """True if the output head is among them."""


def learned(model: ModelConfig, sizes: ModelSizes) -> Learned:
    """Return what is trained of a model: an adapter, or all but frozen parameters. Of a model whose
    files are not on this machine nothing counts as frozen."""
    if model.lora is not None:
        return Learned(sizes.adapter(model.lora), head=False)
    stored = (stored_elements(model) or {}) if model.freeze else {}
    try:
        frozen = frozen_names(stored, model.freeze) if stored else frozenset[str]()
    except ConfigError:  # `roll check` tells it, and the run does not start
        frozen = frozenset()
    heads = [name for name in stored if name.endswith("lm_head.weight")]
    heads = heads or [name for name in stored if name.endswith("embed_tokens.weight")]
    further = {name for name in frozen if _is_further(name, _config_of(model))}
    return Learned(
        sizes.total - sum(stored[name] for name in frozen - further),
        head=frozen.isdisjoint(heads),
    )


def _config_of(model: ModelConfig) -> dict[str, Any]:
    """Return the content of the config.json of a model whose sizes are known."""
    folder = _folder(model.path)
    assert folder is not None
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found


def count(config: Mapping[str, Any]) -> ModelSizes:
    """Compute the sizes of a decoder with gated feed-forward parts from its config.json.

    Raises:
        KeyError: the config lacks a number that such a decoder has.
    """
    told = _told(config)
    hidden, layers, vocab = (
        int(told[key]) for key in ("hidden_size", "num_hidden_layers", "vocab_size")
    )
    heads = int(told["num_attention_heads"])
    queries, keys, attention = _attention(told, hidden, heads)
    dense = 3 * hidden * int(told.get("intermediate_size") or 0)
    number = next((int(told[key]) for key in NUMBER_OF_EXPERTS if told.get(key)), 0)
    width, shared, sparse_layers = 0, 0, 0
    if number:
        width = int(told.get("moe_intermediate_size") or told["intermediate_size"])
        shared = int(told.get("shared_expert_intermediate_size") or 0)
        shared += width * int(told.get("n_shared_experts") or 0)
        sparse_layers = sum(_is_sparse(told, layer) for layer in range(layers))
    sparse = 3 * hidden * (number * width + shared) + number * hidden
    choices = int(told.get("num_experts_per_tok") or 1)
    active = width * choices + shared
    outer = attention + 2 * hidden
    tied = bool(told.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    head = vocab * hidden
    root = head * (1 if tied else 2) + hidden
    of_layer = 3 * hidden * number * width
    body = layers * outer + sparse_layers * sparse + (layers - sparse_layers) * dense
    return ModelSizes(
        total=root + body,
        experts=sparse_layers * of_layer,
        layer=outer + max(sparse, 0 if sparse_layers == layers else dense),
        root=root,
        head=head,
        layers=layers,
        hidden=hidden,
        queries=queries,
        keys=keys,
        heads=heads,
        feed_forward=active if number else dense // (3 * hidden),
        vocab=vocab,
        head_norms=str(told.get("model_type", "")).startswith("qwen3"),
        latent=_latent(told),
        layer_experts=of_layer if sparse_layers == layers or sparse > dense else 0,
        choices=choices,
        further=_counted_further(told, outer + (sparse if number else dense), number * width),
    )


def _counted_further(told: Mapping[str, Any], layer: int, inner: int) -> FurtherLayers:
    """Return the sizes of the layers that predict further tokens of which a config tells.

    Args:
        layer: elements of a layer of the kind that these have inside.
        inner: width of all its routed experts together.
    """
    keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    layers = next((int(told[key]) for key in keys if told.get(key)), 0)
    hidden = int(told["hidden_size"])
    # Three norms, and a projection of the embedding and the hidden state.
    return FurtherLayers(
        layers, layers * (layer + 3 * hidden + 2 * hidden**2), layers * 3 * hidden * inner
    )


def _is_sparse(told: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer of a model with experts has them."""
    return (
        layer >= int(told.get("first_k_dense_replace") or 0)
        and layer not in (told.get("mlp_only_layers") or ())
        and (layer + 1) % int(told.get("decoder_sparse_step") or 1) == 0
    )


def _attention(told: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int, int]:
    """Return the width of all queries, that of all keys, and the elements of an attention part."""
    if told.get("kv_lora_rank"):  # multi-head latent attention
        rank, rope = int(told["kv_lora_rank"]), int(told["qk_rope_head_dim"])
        each, values = int(told["qk_nope_head_dim"]) + rope, int(told["v_head_dim"])
        inner = int(told.get("q_lora_rank") or 0)
        query = inner * (hidden + heads * each) if inner else hidden * heads * each
        key = hidden * (rank + rope) + rank * heads * (each - rope + values)
        return heads * each, heads * each, query + key + heads * values * hidden
    width = int(told.get("head_dim") or hidden // heads)
    keys = width * int(told.get("num_key_value_heads") or heads)
    return heads * width, keys, 2 * hidden * (heads * width + keys)


def _latent(told: Mapping[str, Any]) -> int:
    """Return the width of the vector of a token that latent attention makes keys and values of."""
    rank = int(told.get("kv_lora_rank") or 0)
    return rank + int(told["qk_rope_head_dim"]) if rank else 0


def _folder(path: str) -> Path | None:
    """Return the folder of a model, or that of its config in the hub's cache; None: neither."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if not has_hub_form(path):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def stored_elements(model: ModelConfig) -> dict[str, int] | None:
    """Return the number of elements of each tensor in a model's safetensors files, by name, from
    their headers; None if a file is not on this machine."""
    folder = _folder(model.path)
    stored = None if folder is None else _stored(folder)
    return None if stored is None else {name: one.elements for name, one in stored.items()}


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a safetensors file."""

    elements: int
    size_bytes: int


def _stored(folder: Path) -> dict[str, _Stored] | None:
    """Return the tensors in a folder's safetensors files, by name; None if one cannot be read."""
    single, index = folder / SINGLE, folder / INDEX
    try:
        if single.is_file():
            files = [single]
        else:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            files = [folder / name for name in sorted(set(names))]
        return {name: tensor for file in files for name, tensor in _tensors(file).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # preflight tells it
        return None


def _tensors(file: Path) -> dict[str, _Stored]:
    return {
        name: _Stored(prod(known["shape"]), known["data_offsets"][1] - known["data_offsets"][0])
        for name, known in read_header(file).items()
    }
