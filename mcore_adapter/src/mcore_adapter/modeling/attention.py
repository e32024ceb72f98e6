"""Core attention of the local layer spec, on any device.

Megatron-Core's own core attention refuses packed sequences, keeps a matrix of scores per layer, and
takes no value heads that are narrower than the keys. The attention here passes each sequence to
PyTorch's kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from mcore_adapter.parallel.context import to_heads, to_tokens


class CoreAttention(MegatronModule):
    """Causal attention of this rank's heads, with a window or with sinks if the layer has them.

    Queries may grow with the position (ministral3).

    Batches must be padded on the right: a real token never sees padding, because padding comes
    after it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        query_growth: tuple[float, int] | None = None,
        **unused: object,  # Megatron also passes values for dropout and its context parallelism
    ) -> None:
        """Make the attention of one layer; Megatron-Core passes the arguments.

        Args:
            layer_number: number of the layer in the model, counted from 1.
            softmax_scale: factor of the scores; None: 1 / sqrt(width of a key).
            k_channels: width of a key; None: `config.kv_channels`.
            pg_collection: process groups; needed for attention with sinks and for shared rows.
            query_growth: factor and length, see `Traits.query_growth`.
        """
        super().__init__(config=config)
        self.sharers: dist.ProcessGroup | None = None
        """Ranks that share the tokens of each row, and here exchange them for heads; None: each has
        whole rows."""
        if config.context_parallel_size > 1:
            assert pg_collection is not None
            self.sharers = pg_collection.cp
        width = k_channels or config.kv_channels
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(width)
        self.query_growth = query_growth
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window: int | None = config.window_size[0] + 1 if windowed else None
        """Number of tokens that a token sees, itself included; None: no limit."""
        if config.softmax_type == "learnable":
            assert pg_collection is not None
            heads = config.num_attention_heads // pg_collection.tp.size()
            device = None if config.use_cpu_initialization else torch.cuda.current_device()
            self.softmax_offset: torch.nn.Parameter | None = torch.nn.Parameter(
                torch.zeros(heads, dtype=config.params_dtype, device=device)
            )
            # Without this mark the gradient norm would count the heads of one rank only.
            set_tensor_model_parallel_attributes(self.softmax_offset, True, dim=0, stride=1)
        else:
            self.softmax_offset = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the output of attention.

        Args:
            query: `[T, B, heads, width]`, or `[tokens, heads, width]` for packed sequences. `key`
                and `value` are shaped alike, with as many heads as there are query groups. Ranks
                that share rows have their own tokens only.
            attention_mask: must be None, because the mask is causal.

        Returns:
            `[T, B, heads * value width]`, or `[tokens, heads * value width]` for packed sequences.
        """
        assert attention_mask is None
        assert attention_bias is None
        lengths = self._lengths(query, packed_seq_params)
        if self.sharers is not None:
            query, key, value = (to_heads(x, lengths, self.sharers) for x in (query, key, value))
        if packed_seq_params is None:
            parts = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
            output = self._attend(*parts).permute(2, 0, 1, 3)
        else:
            output = self._attend_packed(query, key, value, lengths)
        if self.sharers is not None:
            output = to_tokens(output, lengths, self.sharers)
        return output.flatten(-2)

    def _lengths(self, query: Tensor, packed: PackedSeqParams | None) -> list[int]:
        """Return the numbers of tokens of the sequences of a whole row."""
        if packed is None:
            return [query.size(0) * (1 if self.sharers is None else self.sharers.size())]
        return [end - start for start, end in itertools.pairwise(packed.cu_seqlens_q.tolist())]

    def _attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]
    ) -> Tensor:
        """Return the output `[tokens, heads, value width]` of sequences of these lengths.

        Neighbours of equal length are computed in one call.
        """
        runs = [(length, len(list(same))) for length, same in itertools.groupby(lengths)]
        tokens = [length * count for length, count in runs]
        outputs = []
        parts = (x.split(tokens) for x in (query, key, value))
        for (length, _), *own in zip(runs, *parts, strict=True):
            rows = [x.unflatten(0, (-1, length)).transpose(1, 2) for x in own]
            outputs.append(self._attend(*rows).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the output `[B, heads, T, value width]` of sequences of one length.

        The arguments are `[B, heads, T, width]` each; `key` and `value` may have fewer heads, and
        values may be narrower.
        """
        if self.query_growth is not None:
            query = query * _growth(query.size(2), *self.query_growth).to(query)
        shared = query.size(1) // key.size(1)
        if shared > 1:
            key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
        if self.softmax_offset is not None:
            sinks_H: Tensor = self.softmax_offset
            if self.sharers is not None:
                sinks_H = sinks_H.chunk(self.sharers.size())[self.sharers.rank()]
            return self._attend_with_sinks(query, key, value, sinks_H)
        mask = self._window_mask(query) if self.window and self.window < query.size(2) else None
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale
        )

    def _attend_with_sinks(
        self, query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor
    ) -> Tensor:
        """Attend with one learned logit per head that takes part in the softmax (gpt_oss).

        The logit, called the sink, carries no value.
        """
        seen = self._window_mask(query)
        scores = (query @ key.transpose(-1, -2)) * self.softmax_scale
        scores = scores.float().masked_fill(~seen, torch.finfo(torch.float32).min)
        sinks = sinks_H.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        return weights.to(value.dtype) @ value

    def _window_mask(self, query: Tensor) -> Tensor:
        """Return a mask `[T, T]`, True where a token (row) sees another (column)."""
        length = query.size(2)
        seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        return seen if self.window is None else seen.triu(1 - self.window)


def _growth(count: int, factor: float, length: int) -> Tensor:
    """Return `1 + factor * ln(1 + position // length)` for each of `count` positions, `[T, 1]`."""
    steps = torch.arange(count).div(length, rounding_mode="floor")
    return 1 + factor * torch.log(1 + steps)[:, None]
