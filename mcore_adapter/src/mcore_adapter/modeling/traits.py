"""Modules and hooks for traits of models that Megatron-Core does not have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from mcore_adapter.modeling.norm import RMSNorm, normalised
from mcore_adapter.modeling.rope import Rope
from mcore_adapter.models.fields import GlobalHeads
from mcore_adapter.parallel.context import positions_here

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


class ScaledOutputLayer(NormedOutputLayer):
    """Layer whose output is multiplied by a factor, which is not trained (gemma4)."""

    layer_scalar: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("layer_scalar", torch.ones(1, dtype=self.config.params_dtype))

    def forward(self, *args: Any, **given: Any) -> tuple[Tensor, Any]:
        """Return the hidden states behind the layer, and the context as it is."""
        hidden, context = super().forward(*args, **given)
        return hidden * self.layer_scalar, context


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


class LocallyRotated(SelfAttention):
    """Attention of a layer that rotates by frequencies of its own."""

    frequencies: Tensor

    def __init__(self, *, config: TransformerConfig, rope: Rope, **kwargs: Any) -> None:
        """Make the attention of one layer.

        Args:
            rope: frequencies of this layer and their scale, which other layers may not have.
        """
        config = copy.copy(config)
        rope.set_scale(config)
        super().__init__(config=config, **kwargs)
        assert not self.config.rotary_interleaved
        self.register_buffer("frequencies", rope.inverse_frequencies, persistent=False)

    def forward(
        self,
        *args: Any,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        **given: Any,
    ) -> WithBias:
        """Return the output of attention and its bias.

        Args:
            rotary_pos_emb: angles of the other layers, `[T, 1, 1, rotated width]`, of which only
                the number of positions is used: of packed sequences those of the longest, also of
                ranks that share it.
        """
        count, sharers = len(rotary_pos_emb), self.pg_collection.cp
        positions = torch.arange(count, device=self.frequencies.device)
        if packed_seq_params is None:
            positions = positions_here([count * sharers.size()], sharers, positions.device)
        angles = torch.outer(positions.float(), self.frequencies)
        own = torch.cat((angles, angles), dim=-1)[:, None, None]
        found: WithBias = super().forward(
            *args, rotary_pos_emb=own, packed_seq_params=packed_seq_params, **given
        )
        return found


class NormedValues(LocallyRotated):
    """Attention that normalises values, too, with heads of a width of their own (gemma4)."""

    def __init__(
        self,
        *,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        heads: GlobalHeads | None,
        **kwargs: Any,
    ) -> None:
        """Make the attention of one layer.

        Args:
            heads: sizes of the heads; None: those of the model's config.
        """
        if heads is not None:
            config = copy.copy(config)
            config.kv_channels, config.num_query_groups = heads.width, heads.groups
        super().__init__(config=config, submodules=submodules, **kwargs)
        if heads is not None and heads.keys_as_values:
            self.linear_qkv = submodules.linear_qkv(
                config.hidden_size,
                self.query_projection_size + self.kv_projection_size,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_comm_buffer_name="qkv",
                tp_group=self.pg_collection.tp,
            )

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, `[T, B, heads, width]` each."""
        mixed, _ = self.linear_qkv(hidden_states)
        width, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        queries = self.num_attention_heads_per_partition // groups * width
        grouped = mixed.unflatten(-1, (groups, -1))
        query, key = grouped[..., :queries], grouped[..., queries : queries + width]
        # Without a projection of their own, values are the keys before their norm.
        value = normalised(grouped[..., -width:], self.config.layernorm_epsilon).to(key.dtype)
        query = query.flatten(-2).unflatten(-1, (-1, width))
        return self.q_layernorm(query), self.k_layernorm(key), value


class ScoreLayer(nn.Module):
    """Linear layer with one output per token, in place of a model's output layer.

    It computes in float32. All tensor parallel ranks hold all of it, and all give the outputs of
    all tokens.
    """

    def __init__(self, model: GPTModel, *, bias: bool) -> None:
        """Make a layer of zeros for a model, whose output layer has the same arguments and
        results."""
        super().__init__()
        config = model.config
        self._group, self._divides = model.pg_collection.tp, config.sequence_parallel
        shapes = ((1, config.hidden_size), (1,))
        weights = [nn.Parameter(torch.zeros(s, dtype=config.params_dtype)) for s in shapes]
        self.weight = weights[0]
        self.bias = weights[1] if bias else None
        for parameter in self.parameters():
            # With this mark, gradients from the tokens of all ranks are summed.
            parameter.sequence_parallel = self._divides  # type: ignore[attr-defined]

    def forward(
        self, hidden_TBD: Tensor, weight: None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Return the outputs `[T, B, 1]`, float32, and no bias that is still to be added."""
        bias = None if self.bias is None else self.bias.float()
        found: Tensor = F.linear(hidden_TBD.float(), self.weight.float(), bias)
        if self._divides:
            # Ranks have tokens of their own. All compute the same of the outputs of all tokens.
            found = gather_from_sequence_parallel_region(
                found, tensor_parallel_output_grad=False, group=self._group
            )
        return found, None


def leave_out_padding(model: GPTModel, token: int) -> None:
    """Let the embedding of the padding token get no gradient where the token is read, as in
    transformers. In a tied head it still gets one as a token that is predicted."""

    def leave_out(module: VocabParallelEmbedding, given: tuple[Tensor], output: Tensor) -> None:
        if not output.requires_grad:
            return
        pads = given[0] == token
        if module.reduce_scatter_embeddings:  # each rank has a part of the positions, in front
            group = module.tp_group
            pads = pads.T.chunk(group.size())[group.rank()]
        output.register_hook(lambda grad: grad.masked_fill(pads[..., None], 0.0))

    model.embedding.word_embeddings.register_forward_hook(leave_out)


def scale_embedding(model: GPTModel, scale: float) -> None:
    """Let a model multiply the embeddings of tokens by a factor, rounded to their data type."""

    def scaled(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output * torch.tensor(scale).to(output)

    model.embedding.register_forward_hook(scaled)


def cap_logits(model: GPTModel, cap: float) -> None:
    """Let a model bound its logits: `cap * tanh(logit / cap)`."""

    def capped(_: nn.Module, __: Any, output: WithBias) -> WithBias:
        logits, bias = output
        return cap * torch.tanh(logits / cap), bias

    model.output_layer.register_forward_hook(capped)
