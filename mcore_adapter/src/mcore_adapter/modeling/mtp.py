"""Layers for multi-token prediction (MTP), and a model that can run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
"""Arguments of the model that are passed on to its MTP layers."""


class GPTModelWithMTP(GPTModel):
    """GPT model that also returns the logits of further tokens while `returns_mtp_logits` is True.

    Megatron-Core's own model needs the labels and adds a loss itself. That loss is the mean over a
    micro-batch, so that the loss of a step would depend on how the step is divided.
    """

    returns_mtp_logits = False
    detaches_mtp = False
    """True if the MTP layers are trained alone: their logits have no gradient to the other layers,
    to the embedding and to the output layer."""

    def _postprocess(
        self,
        hidden_states: Tensor,
        *,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **given: Any,
    ) -> Tensor:
        """Compute the logits from the hidden states of the last layer.

        Returns:
            Logits `[B, T, vocabulary / tp]`. While `returns_mtp_logits` is True, the logits of the
            MTP layers follow in the first dimension: `[(1 + layers) * B, T, vocabulary / tp]`. At
            position i, MTP layer k, counted from 1, predicts the token at i + 1 + k.
        """
        assert labels is None
        assert loss_mask is None
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else None
        logits = [self.output_layer(hidden_states, weight=weight)[0]]
        if self.returns_mtp_logits:
            if self.detaches_mtp:
                # A layer that is computed again gets gradients only if its input asks for one.
                hidden_states = hidden_states.detach().requires_grad_()
                weight = (self.output_layer.weight if weight is None else weight).detach()
            every = self.mtp(
                hidden_states=hidden_states,
                embedding=self._embed_alone if self.detaches_mtp else self.embedding,
                **{name: given[name] for name in _OF_LAYERS},
            )
            _, *states = every.chunk(1 + self.config.mtp_num_layers, dim=0)
            logits += [self.output_layer(each, weight=weight)[0] for each in states]
        return torch.cat([each.transpose(0, 1) for each in logits]).contiguous()

    @torch.no_grad()
    def _embed_alone(self, **tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens, without a gradient."""
        found: Tensor = self.embedding(**tokens)
        return found


class RecomputableMTPLayer(MultiTokenPredictionLayer):
    """Megatron-Core's MTP layer, which here can also be recomputed with packed sequences."""

    def _checkpointed_forward(self, forward_func: Callable[..., Tensor], **given: Any) -> Tensor:
        """Run `forward_func` with the arguments `given`, and again in the backward pass.

        One of them must be `packed_seq_params`, which is no tensor and is passed on as it is.
        """
        # Only tensors can be kept for the backward pass; Megatron-Core 0.16.1 passes all arguments.
        packed = given.pop("packed_seq_params")

        def run(*values: Tensor | None) -> Tensor:
            named = dict(zip(given, values, strict=True))
            return forward_func(**named, packed_seq_params=packed)

        found: Tensor = checkpoint(run, self.config.distribute_saved_activations, *given.values())
        return found


def set_mtp_logits(chunk: nn.Module, *, on: bool, detached: bool = False) -> None:
    """Let a model return the logits of further tokens, or stop it.

    Args:
        chunk: chunk of a model that was built with MTP layers, wrapped or not.
        detached: these logits have a gradient to the MTP layers alone.
    """
    model: Any = unwrapped(chunk)
    model.returns_mtp_logits, model.detaches_mtp = on, detached


def mtp_tensors(chunks: Iterable[nn.Module]) -> list[Tensor]:
    """Return the parameters and buffers of this rank's MTP layers.

    Args:
        chunks: chunks of a model, wrapped or not, with MTP layers or without.
    """
    layers = [getattr(unwrapped(chunk), "mtp", None) for chunk in chunks]
    found = [each for each in layers if isinstance(each, nn.Module)]
    return [tensor for each in found for tensor in (*each.parameters(), *each.buffers())]


def mtp_block_spec(layer: ModuleSpec, count: int) -> MultiTokenPredictionBlockSubmodules:
    """Return the specs of `count` MTP layers.

    Args:
        layer: local layer spec of the transformer layer inside each MTP layer.
    """
    spec = ModuleSpec(
        module=RecomputableMTPLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=RMSNorm,
            hnorm=RMSNorm,
            eh_proj=ColumnParallelLinear,
            transformer_layer=layer,
            layer_norm=RMSNorm,
        ),
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * count)
