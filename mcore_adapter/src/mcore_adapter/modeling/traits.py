"""Modules for traits of models that Megatron-Core does not have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from mcore_adapter.modeling.norm import RMSNorm

WithBias = tuple[Tensor, Tensor | None]
"""Output of a linear layer, and the bias that is still to be added to it."""


class NormedOutputLayer(TransformerLayer):
    """Layer that normalises the outputs of attention and of the MLP before it adds them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        self.post_attention_layernorm, self.post_mlp_layernorm = (
            RMSNorm(config, config.hidden_size, config.layernorm_epsilon) for _ in range(2)
        )
        self.self_attn_bda = partial(_adding, self.post_attention_layernorm)
        self.mlp_bda = partial(_adding, self.post_mlp_layernorm)


def _adding(
    norm: nn.Module, training: bool, fused: bool
) -> Callable[[WithBias, Tensor, float], Tensor]:
    """Return the function that adds an output to the residual, which has the signature of
    Megatron-Core's for bias, dropout and addition."""

    def add(output: WithBias, residual: Tensor, dropout: float) -> Tensor:
        assert not dropout
        hidden, bias = output
        normed: Tensor = norm(hidden if bias is None else hidden + bias)
        return residual + normed

    return add
