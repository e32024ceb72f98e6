"""Several sequences in one row: no padding, and attention stays inside each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from roll.core.errors import ConfigError

ATTENTION = "roll_packed"
"""Name of the attention of packed rows that needs no kernel of its own."""
_KERNELS = ("flash_attention_2",)
"""Those of transformers that know where a sequence ends."""
_ATTENDING = frozenset({"full_attention", "sliding_attention"})


def enable(model: PreTrainedModel) -> None:
    """Let `model` take packed rows; others give what they gave before.

    Raises:
        ConfigError: a layer of the model looks across the borders of sequences in another way
            than attention, or its attention cannot be replaced.
    """
    check(model, "packing")
    if model.config.get_text_config()._attn_implementation not in _KERNELS:
        model.set_attn_implementation(ATTENTION)


def check(model: PreTrainedModel, key: str) -> None:
    """
    Args:
        key: that asks for rows which only attention may look along.

    Raises:
        ConfigError: another layer does, or the model's attention cannot be replaced.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENDING
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        kinds.add("convolution")
    if kinds or not model._supports_attention_backend:
        why = f"layers of kind {', '.join(sorted(kinds))}" if kinds else "attention of its own"
        raise ConfigError(
            f"{key}: model type {config.model_type!r} has {why}, which would mix the tokens of a "
            f"row in a way of their own; leave out `{key}`"
        )


def arguments(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """What a model needs to know of a row `[1, N]` that holds sequences of these lengths."""
    ends = torch.tensor(lengths).cumsum(0)
    borders = torch.cat([ends.new_zeros(1), ends]).to(device, torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {
        "position_ids": positions[None].to(device),
        "row_lengths": tuple(lengths),
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of `[B, heads, T, head_dim]`, sequence by sequence.

    A loop costs a call per sequence, and computes no score that is masked away.

    Args:
        query: with a multiple of the heads that key and value have.
        kwargs: `row_lengths`, of the sequences in each row.

    Raises:
        ConfigError: the model's attention has more to it, or hands on no arguments.
    """
    del dropout  # there is none: see `roll.models.load.load_config`
    if attention_mask is not None or kwargs.get("s_aux") is not None or kwargs.get("softcap"):
        raise ConfigError(
            f"{type(module).__name__} has a mask, sinks or a soft cap of its own, so rows can "
            "neither be packed nor shared; leave out `packing`, `ulysses` and `tp` (packing alone "
            "also goes with model.attention: flash_attention_2)"
        )
    groups = query.shape[1] // key.shape[1]  # not the module's: a rank may have some heads only
    if groups > 1:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    lengths = list(handed_on(module, kwargs, "row_lengths"))
    parts = [
        nn.functional.scaled_dot_product_attention(
            q, k, v, scale=scaling, **_causal(q.shape[2], sliding_window, q.device)
        )
        for q, k, v in zip(
            *(each.split(lengths, dim=2) for each in (query, key, value)), strict=True
        )
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def handed_on(module: nn.Module, kwargs: dict[str, Any], name: str) -> Any:
    """An argument of the model that its attention has to pass on to the attention function.

    Raises:
        ConfigError: it does not.
    """
    if name not in kwargs:
        raise ConfigError(
            f"{type(module).__name__} does not hand on the model's arguments ({name}) to its "
            "attention function, so rows can neither be packed nor shared; leave out `packing`, "
            "`ulysses` and `tp`"
        )
    return kwargs[name]


def _causal(length: int, window: int | None, device: torch.device) -> dict[str, Any]:
    if window is None or window >= length:
        return {"is_causal": True}
    at = torch.arange(length, device=device)
    back = at[:, None] - at
    return {"attn_mask": (back >= 0) & (back < window)}


AttentionInterface.register(ATTENTION, packed_attention)
