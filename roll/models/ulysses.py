"""Sequence parallel attention of DeepSpeed-Ulysses (arXiv 2309.14509).

Each rank holds a slice of the tokens of every row. Before attention, the ranks exchange data: a
rank that has some tokens of all heads gets all tokens of some heads. After attention, they exchange
the results back. No other part of a model mixes the tokens of a row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from roll.core.errors import ConfigError
from roll.models import packing
from roll.models.kernels.attention import FLASH
from roll.models.kernels.rotary import kinds_by_length

ATTENTION = "roll_ulysses"
"""Name under which transformers finds `attention`."""
_HEADS, _TOKENS = 1, 2
"""Axes of the inputs of attention, `[B, heads, T, head_dim]`."""


def enable(model: PreTrainedModel, ranks: int, *, tp: int = 1) -> None:
    """Make `model` accept slices of rows, packed or not.

    Args:
        ranks: number of ranks that share a row and exchange tokens for heads.
        tp: number of tensor parallel ranks, over which the heads are split already.

    Raises:
        ConfigError: a layer mixes the tokens of a row in another way than attention, the attention
            of the model is not supported, or the heads cannot be divided among the ranks.
    """
    key = "ulysses" if ranks > 1 else "tp"
    packing.check(model, key)
    config = model.config.get_text_config()
    why = ""
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        why = "attention sinks"
    elif getattr(config, "attn_logit_softcapping", None):
        why = "a soft cap on attention (attn_logit_softcapping)"
    elif rope := sorted(kinds_by_length(config)):
        why = f"rotary embeddings of type {rope[0]}, which depend on how long a row is"
    elif model.config._attn_implementation in FLASH:
        kernel = model.config._attn_implementation
        why = f"model.attention: {kernel}, which takes no slices (sdpa does)"
    elif ranks > 1:
        why = _unshared_heads(config, ranks, tp)
    if why:
        raise ConfigError(f"{key}: model type {config.model_type!r} has {why}; leave out `{key}`")
    packing.use(model, ATTENTION)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention for this rank's slice of inputs `[B, heads, T / ranks, head_dim]`.

    Args:
        kwargs: arguments of `packing.packed_attention`, for whole rows; and `sequence_group`, the
            ranks that hold the slices of a row, in order, or None if this rank has whole rows.

    Returns:
        Attention output `[B, T / ranks, heads, head_dim]`; and None in place of attention weights.
    """
    sequence_group: dist.ProcessGroup | None = packing.required_argument(
        module, kwargs, "sequence_group"
    )
    if sequence_group is None:
        return packing.packed_attention(module, query, key, value, attention_mask, **kwargs)
    repeats = sequence_group.size() // key.shape[_HEADS]
    if repeats > 1:
        # There are fewer key heads than ranks. The query heads of a rank share one key head, so
        # each rank gets a copy of its key head.
        key, value = (each.repeat_interleave(repeats, dim=_HEADS) for each in (key, value))
    query, key, value = (
        _Exchange.apply(each, sequence_group, _HEADS, _TOKENS) for each in (query, key, value)
    )
    out_BTHD, _ = packing.packed_attention(module, query, key, value, attention_mask, **kwargs)
    return _Exchange.apply(out_BTHD, sequence_group, 1, 2), None


class _Exchange(torch.autograd.Function):
    """Collective exchange: send each rank a part along `cut`, join received parts along `join`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
        ctx.group, ctx.cut, ctx.join = group, cut, join
        return _exchanged(x, group, cut, join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grads[0], ctx.group, ctx.join, ctx.cut), None, None, None


def _exchanged(x: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
    """Send rank i of the group the i-th part of `x` along axis `cut`; return the parts received,
    joined along axis `join` in the order of the ranks. Collective."""
    ours = torch.stack(x.chunk(group.size(), dim=cut))
    theirs = torch.empty_like(ours)
    dist.all_to_all_single(theirs, ours, group=group)
    return torch.cat(theirs.unbind(), dim=join)


def _unshared_heads(config: Any, ranks: int, tp: int) -> str:
    """Return why the ranks cannot divide the heads, for the error message; empty if they can."""
    of_each = f" on each of {tp} tensor parallel ranks" if tp > 1 else ""
    heads = config.num_attention_heads
    key_heads = (getattr(config, "num_key_value_heads", None) or heads) // tp
    heads //= tp
    if heads % ranks:
        return f"{heads} attention heads{of_each}, which {ranks} ranks cannot share evenly"
    if key_heads % ranks and ranks % key_heads:
        return (
            f"{key_heads} key and value heads{of_each}: {ranks} ranks can neither share nor "
            "repeat them evenly"
        )
    return ""


AttentionInterface.register(ATTENTION, attention)
