"""Multi-head latent attention of the local layer spec, and sparse attention in it."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from mcore_adapter.modeling.attention import CoreAttention


class LatentAttention(MLASelfAttention):
    """Megatron-Core's latent attention, with correct gradients for the rotated part of the keys.

    All heads share that part, so its gradients must be summed over the tensor parallel ranks. With
    a column parallel down projection, Megatron-Core 0.16.1 gathers the part from these ranks and,
    in the backward pass, drops the gradients from the heads of other ranks. With a down projection
    that is duplicated on all ranks, it sums the gradients. Therefore a hook gives the output the
    shape that a duplicated projection's output has.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.tensor_model_parallel_size > 1:
            self.linear_kv_down_proj.register_forward_hook(_like_duplicated)


def _like_duplicated(
    module: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Turn `[T, B, width / tp]` of all tokens into `[T / tp, B, width]` of this rank's tokens."""
    whole = gather_from_tensor_model_parallel_region(output[0])
    return scatter_to_sequence_parallel_region(whole), output[1]


class SparseAttention(CoreAttention):
    """Causal attention in which each token sees only the tokens that an indexer chooses.

    This is DeepSeek Sparse Attention (arXiv 2512.02556), as glm_moe_dsa has it. Megatron-Core's own
    needs a package for CUDA and bfloat16, and trains the indexer.
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.indexer = Indexer(config)

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        x: Tensor,
        qr: Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the output of attention, shaped as by `CoreAttention.forward`.

        Args:
            query: `[T, B, heads, width]`, or `[tokens, heads, width]` for packed sequences; `key`
                and `value` alike.
            attention_mask: must be None, because the mask is causal.
            x: input of attention, `[T, B, hidden]`, or this rank's tokens of it.
            qr: narrow queries, `[T, B, rank]`, or `[tokens, rank]` for packed sequences; or this
                rank's tokens of them.
        """
        assert attention_mask is None
        hidden, narrow = (self._of_all_tokens(each) for each in (x, qr))
        if packed_seq_params is None:
            heads = [part.permute(1, 2, 0, 3) for part in (query, key, value)]
            own = [part.transpose(0, 1) for part in (hidden, narrow)]
            return self._attend_to_chosen(heads, own).permute(2, 0, 1, 3).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        outputs = []
        for start, end in itertools.pairwise(bounds):
            heads = [part[start:end].transpose(0, 1)[None] for part in (query, key, value)]
            own = [part.flatten(0, -2)[None, start:end] for part in (hidden, narrow)]
            outputs.append(self._attend_to_chosen(heads, own))
        return torch.cat(outputs, dim=2)[0].transpose(0, 1).flatten(1)

    def _of_all_tokens(self, part: Tensor) -> Tensor:
        """Return a tensor of all tokens; gradients do not pass through the choice of tokens."""
        part = part.detach()
        if not self.config.sequence_parallel:
            return part
        whole: Tensor = gather_from_sequence_parallel_region(part)
        return whole

    def _attend_to_chosen(self, heads: list[Tensor], own: list[Tensor]) -> Tensor:
        """Return the output `[B, heads, T, value width]` of sequences of one length.

        Args:
            heads: queries, keys and values, `[B, heads, T, width]` each.
            own: input of attention and narrow queries, `[B, T, width]` each.
        """
        query, key, value = heads
        causal = self._window_mask(query)
        chosen = self.indexer(*own, causal)
        seen = torch.zeros_like(causal).expand(len(query), -1, -1).scatter(-1, chosen, value=True)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=(seen & causal)[:, None], scale=self.softmax_scale
        )


class Indexer(nn.Module):
    """Choice of the tokens that each token sees; its weights are not trained.

    The weights are buffers, so that no optimizer changes them, not even by weight decay. Every
    tensor parallel rank has all of them.
    """

    frequencies: Tensor

    def __init__(self, config: MLATransformerConfig) -> None:
        super().__init__()
        self.heads, self.width = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.most = config.dsa_indexer_topk
        turned = config.qk_pos_emb_head_dim
        exponents = torch.arange(0, turned, 2, dtype=torch.float32) / turned
        self.register_buffer("frequencies", config.rotary_base**-exponents, persistent=False)
        rank, hidden, dtype = config.q_lora_rank, config.hidden_size, config.params_dtype
        self.wq_b = _Fixed((self.heads * self.width, rank), dtype)
        self.wk = _Fixed((self.width, hidden), dtype)
        self.k_norm = _Fixed((self.width,), dtype, bias=True)
        self.weights_proj = _Fixed((self.heads, hidden), dtype)

    @torch.no_grad()
    def forward(self, hidden_BTD: Tensor, narrow_BTR: Tensor, causal_TT: Tensor) -> Tensor:
        """Return the numbers of the tokens that each token sees, `[B, T, most]`.

        They may be tokens that come later, where too few come before.

        Args:
            hidden_BTD: input of attention.
            narrow_BTR: queries after the narrow projection and its norm.
            causal_TT: True where a token (row) may see another (column).
        """
        queries = F.linear(narrow_BTR, self.wq_b.weight).unflatten(-1, (self.heads, self.width))
        keys = F.linear(hidden_BTD, self.wk.weight)
        keys = F.layer_norm(keys, (self.width,), self.k_norm.weight, self.k_norm.bias, 1e-6)
        queries, keys = self._rotated(queries), self._rotated(keys[:, :, None])[:, :, 0]
        scores = queries.float() @ keys.float().transpose(-1, -2).unsqueeze(1)
        scores = F.relu(scores * self.width**-0.5)
        weights = F.linear(hidden_BTD, self.weights_proj.weight).float() * self.heads**-0.5
        total = (weights.unsqueeze(-2) @ scores).squeeze(-2).masked_fill(~causal_TT, -torch.inf)
        return total.topk(min(self.most, total.size(-1)), dim=-1).indices

    def _rotated(self, x: Tensor) -> Tensor:
        """Return `x`, `[B, T, heads, width]`, with its first dimensions rotated in pairs."""
        turned = 2 * len(self.frequencies)
        positions = torch.arange(x.size(1), device=x.device, dtype=torch.float32)
        angles = torch.outer(positions, self.frequencies)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        even, odd, rest = x[..., 0:turned:2], x[..., 1:turned:2], x[..., turned:]
        return torch.cat((even * cos - odd * sin, odd * cos + even * sin, rest), dim=-1)


class _Fixed(nn.Module):
    """Weight that is not trained, and perhaps a bias; both are read from the checkpoint."""

    weight: Tensor
    bias: Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(shape, dtype=dtype))
        if bias:
            self.register_buffer("bias", torch.zeros(shape, dtype=dtype))
