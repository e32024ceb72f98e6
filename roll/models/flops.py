"""Floating-point operations of a model's passes, counted from its config.

Counted are matrix products, as in PaLM (arXiv 2204.02311, appendix B) and Megatron-LM (arXiv
2104.04473, section 5.1): a multiplication and an addition for each element of a matrix that a token
meets (2 N), and those of its queries with all keys of its row and of the results with the values (4
L H T); twice as much again for the backward pass (6 N + 12 L H T). Attention counts as if it were
not causal, as there. What a run computes twice to save memory does not count, nor does padding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError
from roll.models.load import load_config
from roll.models.trained import select_trained

FAMILIES = frozenset(
    {
        "deepseek_v3",
        "gemma2",
        "gemma3_text",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "granite",
        "granitemoe",
        "llama",
        "minimax_m2",
        "ministral3",
        "mistral",
        "mixtral",
        "olmo2",
        "olmoe",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
    }
)
"""Model types whose operations are known: a test compares each with those that PyTorch counts."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of some layers that are alike."""

    layers: int
    width: int
    """Elements of all heads' keys and values that a token's queries and weights meet, for each
    token that they look at."""
    window: int | None = None
    """Number of latest tokens that a token looks at; None: all of its row."""


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Numbers of a model that its operations depend on; elements are those that a token meets."""

    body: int
    """Elements of all matrices except the head."""
    trained: int
    """Those among them whose gradients are computed."""
    passed: int
    """Those among them that gradients pass on their way to what is trained."""
    head: int
    """Elements of the head; 0 of a model that does not write tokens."""
    head_trained: bool
    attention: tuple[Attention, ...]

    def forward(self, lengths_B: Tensor, heads: int) -> int:
        """Return the operations of a forward pass.

        Args:
            lengths_B: number of tokens of each row.
            heads: number of tokens of which the head computes logits.
        """
        return 2 * (self.body * int(lengths_B.sum()) + self.head * heads) + self._looked(lengths_B)

    def update(self, lengths_B: Tensor, heads: int) -> int:
        """Return the operations of a forward and a backward pass; arguments as for `forward`."""
        tokens = int(lengths_B.sum())
        learned = self.trained * tokens + self.head * heads * self.head_trained
        through = self.passed * tokens + self.head * heads
        # Gradients of queries, keys, values and weights: two products for each of the forward pass.
        looked = 2 * self._looked(lengths_B) * self.passed // max(self.body, 1)
        return self.forward(lengths_B, heads) + 2 * (learned + through) + looked

    def _looked(self, lengths_B: Tensor) -> int:
        """Return the operations of attention in a forward pass."""
        found = 0
        for part in self.attention:
            seen_B = lengths_B if part.window is None else lengths_B.clamp(max=part.window)
            found += 2 * part.layers * part.width * int((lengths_B * seen_B).sum())
        return found


def flops_of(model: ModelConfig, *, trains: bool, writes: bool) -> ModelFlops | None:
    """Return the operations of a model; None if its type is not in `FAMILIES`, if its folder has no
    config, or if what is trained has names that only another backend's model has.

    The random numbers of this process stay as they are.

    Args:
        trains: whether it is trained; then adapter and frozen parameters of `model` count.
        writes: whether it has a head with a logit for each token of the vocabulary.
    """
    try:
        config = load_config(model)
        if config.model_type not in FAMILIES:
            return None
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            made = AutoModelForCausalLM.from_config(config)
            select_trained(made, model, trainable=trains, new_head=None, seed=0)
    except ConfigError:
        return None
    return counted(made, trains=trains, writes=writes)


def counted(model: PreTrainedModel, *, trains: bool, writes: bool) -> ModelFlops:
    """Return the operations of a model of `FAMILIES`; the tensors may be on the meta device."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    parameters = dict(model.named_parameters())
    learns = [name for name, p in parameters.items() if trains and p.requires_grad]
    first = min(map(_layer, learns), default=len(parameters))
    body, trained, passed = 0, 0, 0
    for name, elements in _matrices(model, skipped=(embedding, head)):
        body += elements
        trained += elements * (name in learns)
        passed += elements * (_layer(name) >= first)
    return ModelFlops(
        body=body,
        trained=trained,
        passed=passed,
        head=head.weight.numel() if writes else 0,
        head_trained=trains and head.weight.requires_grad,
        attention=tuple(_attention(model.config)),
    )


def _layer(name: str) -> int:
    """Return the number of the layer that a parameter belongs to; -1 of one before all layers, and
    a large one of what follows them."""
    found = _LAYER.search(name)
    if found is not None:
        return int(found[1])
    return -1 if "embed" in name else 2**31


def _matrices(model: PreTrainedModel, skipped: tuple[nn.Module, ...]) -> Iterator[tuple[str, int]]:
    """Yield the name of each matrix and the elements of it that a token meets. The matrices of all
    experts of a layer are one parameter, of which a token meets those of its experts."""
    config = model.config
    without = {id(module.weight) for module in skipped}
    for name, parameter in model.named_parameters():
        if id(parameter) in without or name.endswith("bias"):
            continue
        if parameter.dim() == 2:
            yield name, parameter.numel()
        elif parameter.dim() == 3:
            yield name, parameter.numel() // len(parameter) * config.num_experts_per_tok


def _attention(config: PreTrainedConfig) -> Iterator[Attention]:
    """Yield the attention of layers that look at the whole row, and of those that do not."""
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    if getattr(config, "kv_lora_rank", None):  # latent attention
        width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    else:
        width = 2 * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * layers
    near = sum(kind == "sliding_attention" for kind in kinds)
    for number, seen in ((layers - near, None), (near, window)):
        if number:
            yield Attention(number, heads * width, seen)
