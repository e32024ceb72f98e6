"""Several sequences in one row: no padding, and attention stays inside each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
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

    No score is computed that is masked away: neighbours of equal length go in one call.

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
    if groups > 1 and not _shares_heads(query, sliding_window):
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    lengths = handed_on(module, kwargs, "row_lengths")
    runs = [(length, len(list(same))) for length, same in groupby(lengths)]
    if len(runs) == 1:  # splitting would copy in the backward pass
        (length, _) = runs[0]
        return _of_equals(query, key, value, length, scaling, sliding_window), None
    tokens = [length * count for length, count in runs]
    split = (each.split(tokens, dim=2) for each in (query, key, value))
    parts = [
        _of_equals(q, k, v, length, scaling, sliding_window)
        for (length, _), q, k, v in zip(runs, *split, strict=True)
    ]
    return torch.cat(parts, dim=1), None


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


def _shares_heads(query: Tensor, window: int | None) -> bool:
    """Whether the kernel takes fewer heads of keys than of queries; others would do without it."""
    return query.device.type == "cpu" and window is None


def _of_equals(
    query: Tensor, key: Tensor, value: Tensor, length: int, scale: float | None, window: int | None
) -> Tensor:
    """`[B, T, heads, head_dim]`, of rows that hold sequences of this length."""
    q, k, v = (_parted(each, length) for each in (query, key, value))
    return _joined(_causal(q, k, v, scale, window), query.shape[0])


def _parted(rows_BHTD: Tensor, length: int) -> Tensor:
    """Sequences of this length as rows: `[B * T / length, heads, length, head_dim]`."""
    return rows_BHTD.unflatten(2, (-1, length)).transpose(1, 2).flatten(0, 1)


def _joined(parts_NHLD: Tensor, rows: int) -> Tensor:
    """What `_parted` took apart: `[rows, T, heads, head_dim]`, contiguous."""
    return parts_NHLD.transpose(1, 2).contiguous().unflatten(0, (rows, -1)).flatten(1, 2)


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """Each token sees itself and those before it, of which `window` counts the nearest."""
    length = query.shape[2]
    if window is None or window >= length:
        shares = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(
            query, key, value, scale=scale, is_causal=True, enable_gqa=shares
        )
    # Block by block: a mask of the whole would grow with the square of the length.
    parts = []
    for start in range(0, length, window):
        end, first = min(start + window, length), max(0, start - window + 1)
        at_Q = torch.arange(start, end, device=query.device)
        back_QK = at_Q[:, None] - torch.arange(first, end, device=query.device)
        parts.append(
            scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, first:end],
                value[:, :, first:end],
                scale=scale,
                attn_mask=(back_QK >= 0) & (back_QK < window),
            )
        )
    return torch.cat(parts, dim=2)


AttentionInterface.register(ATTENTION, packed_attention)
