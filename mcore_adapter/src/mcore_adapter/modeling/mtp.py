"""Layers that predict further tokens (MTP), and a model that can run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from mcore_adapter.local_tensors import unwrapped
from mcore_adapter.modeling.norm import RMSNorm

_OF_LAYERS = (
    "input_ids",
    "position_ids",
    "attention_mask",
    "rotary_pos_emb",
    "rotary_pos_cos",
    "rotary_pos_sin",
    "packed_seq_params",
)


class FurtherModel(GPTModel):
    """Gives the logits of further tokens, too, while it is told so.

    Megatron-Core's own wants the labels and adds a loss itself: the mean over a micro-batch, so
    that the loss of a step would depend on how it is cut.
    """

    predicts_further = False

    def _postprocess(
        self,
        hidden_states: Tensor,
        *,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **given: Any,
    ) -> Tensor:
        """
        Returns:
            Logits [B, T, vocabulary / tp], or with those of further tokens behind the others
            [(1 + layers) * B, ...]. At place i layer k predicts the token at i + 1 + k.
        """
        assert labels is None
        assert loss_mask is None
        states = (hidden_states,)
        if self.predicts_further:
            every = self.mtp(
                hidden_states=hidden_states,
                embedding=self.embedding,
                **{name: given[name] for name in _OF_LAYERS},
            )
            states = every.chunk(1 + self.config.mtp_num_layers, dim=0)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else None
        logits = [self.output_layer(each, weight=weight)[0].transpose(0, 1) for each in states]
        return torch.cat(logits).contiguous()


class FurtherLayer(MultiTokenPredictionLayer):
    """Megatron-Core's, which can also be computed again of packed sequences."""

    def _checkpointed_forward(self, forward_func: Callable[..., Tensor], **given: Any) -> Tensor:
        # Only tensors can be kept for the backward pass, and Megatron-Core 0.16.1 hands on all.
        packed = given.pop("packed_seq_params")

        def run(*values: Tensor | None) -> Tensor:
            named = dict(zip(given, values, strict=True))
            return forward_func(**named, packed_seq_params=packed)

        found: Tensor = checkpoint(run, self.config.distribute_saved_activations, *given.values())
        return found


def predict_further(chunk: nn.Module, *, on: bool) -> None:
    """
    Args:
        chunk: of a model that was built with further layers, wrapped or not.
    """
    model: Any = unwrapped(chunk)
    model.predicts_further = on


def further_spec(layer: ModuleSpec, count: int) -> MultiTokenPredictionBlockSubmodules:
    """
    Args:
        layer: what each of them has within, of the local layer spec.
    """
    spec = ModuleSpec(
        module=FurtherLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=RMSNorm,
            hnorm=RMSNorm,
            eh_proj=ColumnParallelLinear,
            transformer_layer=layer,
            layer_norm=RMSNorm,
        ),
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * count)
