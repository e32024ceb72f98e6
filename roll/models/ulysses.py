"""Attention of rows that several ranks share: DeepSpeed-Ulysses (arXiv 2309.14509).

Each rank has a slice of every row's tokens. Around the attention function, that slice of all heads
is exchanged for all tokens of some heads, and back; nothing else of a model looks along a row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from roll.core.errors import ConfigError
from roll.models import packing

ATTENTION = "roll_ulysses"
"""Name of the attention of slices of rows, packed or not."""
_HEADS, _TOKENS = 1, 2
"""Axes of what goes into attention, `[B, heads, T, head_dim]`."""
_OF_WHOLE_ROWS = ("dynamic", "longrope")
"""Rotary embeddings that depend on how long a row is."""


def enable(model: PreTrainedModel, ranks: int, *, tp: int = 1) -> None:
    """Let `model` take slices of rows.

    Args:
        ranks: that exchange tokens for heads.
        tp: ranks that have a part of the heads each already.

    Raises:
        ConfigError: a layer looks along the rows in another way than attention, its attention
            cannot be replaced, or its heads cannot be shared out.
    """
    key = "ulysses" if ranks > 1 else "tp"
    packing.check(model, key)
    config = model.config.get_text_config()
    why = ""
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        why = "attention sinks"
    elif getattr(config, "attn_logit_softcapping", None):
        why = "a soft cap on attention (attn_logit_softcapping)"
    elif rope := sorted(_rope_types(config) & set(_OF_WHOLE_ROWS)):
        why = f"rotary embeddings of type {rope[0]}, which depend on how long a row is"
    elif model.config._attn_implementation == "flash_attention_2":
        why = "model.attention: flash_attention_2, which takes no slices (sdpa does)"
    elif ranks > 1:
        why = _unshared_heads(config, ranks, tp)
    if why:
        raise ConfigError(f"{key}: model type {config.model_type!r} has {why}; leave out `{key}`")
    model.set_attn_implementation(ATTENTION)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of this rank's slice, `[B, heads, T / ranks, head_dim]`.

    Args:
        kwargs: as of `packing.packed_attention`, of whole rows; and `sequence_group`, the ranks
            that have the slices of a row, in order, or None where rows are whole.
    """
    sequence_group: dist.ProcessGroup | None = packing.handed_on(module, kwargs, "sequence_group")
    if sequence_group is None:
        return packing.packed_attention(module, query, key, value, attention_mask, **kwargs)
    repeats = sequence_group.size() // key.shape[_HEADS]
    if repeats > 1:
        # Query heads of one rank have one key head in common, so none is needed elsewhere.
        key, value = (each.repeat_interleave(repeats, dim=_HEADS) for each in (key, value))
    query, key, value = (
        _Exchange.apply(each, sequence_group, _HEADS, _TOKENS) for each in (query, key, value)
    )
    out_BTHD, _ = packing.packed_attention(module, query, key, value, attention_mask, **kwargs)
    return _Exchange.apply(out_BTHD, sequence_group, 1, 2), None


class _Exchange(torch.autograd.Function):
    """Give each rank a part along one axis, and join what comes along another; collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
        ctx.group, ctx.cut, ctx.join = group, cut, join
        return _exchanged(x, group, cut, join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grads[0], ctx.group, ctx.join, ctx.cut), None, None, None


def _exchanged(x: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
    ours = torch.stack(x.chunk(group.size(), dim=cut))
    theirs = torch.empty_like(ours)
    dist.all_to_all_single(theirs, ours, group=group)
    return torch.cat(theirs.unbind(), dim=join)


def _unshared_heads(config: Any, ranks: int, tp: int) -> str:
    """What is wrong with the numbers of heads; empty if nothing is."""
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


def _rope_types(config: Any) -> set[str]:
    rope = getattr(config, "rope_parameters", None) or {}
    of_kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    return {each["rope_type"] for each in of_kinds if "rope_type" in each}


AttentionInterface.register(ATTENTION, attention)
