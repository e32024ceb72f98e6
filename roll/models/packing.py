"""Packed rows: several sequences in one row without padding, and attention within each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from roll.core.errors import ConfigError
from roll.models.kernels.attention import FLASH

ATTENTION = "roll_packed"
"""Name under which transformers finds `packed_attention`."""
_ATTENDING = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers that mix the tokens of a row by attention only."""


@dataclass(frozen=True, eq=False)
class RowLengths:
    """Lengths of the sequences in a row. Not a plain tuple, because the number of its entries would
    be a constant of compiled code, which would be compiled anew for each other number."""

    each: tuple[int, ...]


def enable(model: PreTrainedModel) -> None:
    """Make `model` accept packed rows; results for other rows do not change.

    Raises:
        ConfigError: a layer of the model mixes the tokens of a row in another way than attention,
            or the attention of the model cannot be replaced.
    """
    check(model, "packing")
    if model.config.get_text_config()._attn_implementation not in FLASH:
        use(model, ATTENTION)


def use(model: PreTrainedModel, attention: str) -> None:
    """Let the layers of the language model compute attention with the function that transformers
    finds under this name. Those of a vision part, which is not causal, keep theirs."""
    divided = "text_config" in model.config.sub_configs
    model.set_attn_implementation({"text_config": attention} if divided else attention)


def check(model: PreTrainedModel, key: str) -> None:
    """Check that only attention mixes the tokens of a row, and that attention can be replaced.

    Args:
        key: config key that needs this, for the error message.

    Raises:
        ConfigError: another layer mixes the tokens of a row, or attention cannot be replaced.
    """
    if why := other_mixers(model):
        kind = model.config.get_text_config().model_type
        raise ConfigError(
            f"{key}: model type {kind!r} has {why}, which would mix the tokens of a row in a way "
            f"of their own; leave out `{key}`"
        )


def other_mixers(model: PreTrainedModel) -> str:
    """Return what mixes the tokens of a row beside attention that can be replaced; empty if nothing
    does."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENDING
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        kinds.add("convolution")
    if kinds:
        return f"layers of kind {', '.join(sorted(kinds))}"
    return "" if model._supports_attention_backend else "attention of its own"


def arguments(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Return the model's arguments for a row `[1, N]` that holds sequences of these lengths.

    Args:
        lengths: number of tokens of each sequence, in order; at least one sequence.
        device: device of the tensors among the arguments.
    """
    ends = torch.tensor(lengths).cumsum(0)
    borders = torch.cat([ends.new_zeros(1), ends]).to(device, torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {
        "position_ids": positions[None].to(device),
        "row_lengths": RowLengths(tuple(lengths)),
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
    """Compute causal attention of `[B, heads, T, head_dim]`, separately for each sequence.

    Args:
        query: queries, whose number of heads is a multiple of that of key and value.
        kwargs: `row_lengths`, the lengths of the sequences in each row.

    Returns:
        Attention output `[B, T, heads, head_dim]`; and None in place of attention weights.

    Raises:
        ConfigError: the model's attention has a mask, sinks or a soft cap, or does not pass on the
            model's arguments.
    """
    del dropout  # always 0, see `roll.models.load.load_config`
    if attention_mask is not None or kwargs.get("s_aux") is not None or kwargs.get("softcap"):
        raise ConfigError(
            f"{type(module).__name__} has a mask, sinks or a soft cap of its own, so rows can "
            "neither be packed nor shared; leave out `packing`, `ulysses` and `tp` (packing alone "
            "also goes with model.attention: flash_attention_2)"
        )
    if sliding_window is None:
        sliding_window = _window_of_mask(module)
    groups = query.shape[1] // key.shape[1]  # from the shapes: a rank may hold only some heads
    # On GPUs or with a window, `enable_gqa` would make torch choose a slower kernel.
    shares = query.device.type == "cpu" and sliding_window is None
    if groups > 1 and not shares:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    lengths = required_argument(module, kwargs, "row_lengths").each
    return _attend(query, key, value, lengths, scaling, sliding_window), None


def _window_of_mask(module: nn.Module) -> int | None:
    """Return the window, in tokens, of attention that hands on none, because the mask of the model
    contains it, which packed rows do not have; None if it has no window."""
    config = getattr(module, "config", None)
    kind = getattr(config, "model_type", None)
    if kind == "phimoe":  # in all layers
        return getattr(config, "sliding_window", None)
    return getattr(module, "sliding_window", None) if kind == "qwen2_moe" else None


def required_argument(module: nn.Module, kwargs: dict[str, Any], name: str) -> Any:
    """Return an argument of the model that the attention module must pass on to this function.

    Raises:
        ConfigError: the attention module does not pass on the argument.
    """
    if name not in kwargs:
        raise ConfigError(
            f"{type(module).__name__} does not hand on the model's arguments ({name}) to its "
            "attention function, so rows can neither be packed nor shared; leave out `packing`, "
            "`ulysses` and `tp`"
        )
    return kwargs[name]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Compute attention `[B, T, heads, head_dim]` of rows with sequences of these lengths.

    Adjacent sequences of equal length are processed in one call.
    """
    runs = [(length, len(list(same))) for length, same in groupby(lengths)]
    if len(runs) == 1:  # split and cat would copy in the backward pass
        return _attend_equal_lengths(query, key, value, lengths[0], scale, window)
    tokens = [length * count for length, count in runs]
    split = (each.split(tokens, dim=2) for each in (query, key, value))
    parts = [
        _attend_equal_lengths(q, k, v, length, scale, window)
        for (length, _), q, k, v in zip(runs, *split, strict=True)
    ]
    return torch.cat(parts, dim=1)


def _attend_equal_lengths(
    query: Tensor, key: Tensor, value: Tensor, length: int, scale: float | None, window: int | None
) -> Tensor:
    """Compute attention `[B, T, heads, head_dim]` of rows whose sequences all have this length."""
    q, k, v = (_sequences_to_rows(each, length) for each in (query, key, value))
    return _rows_to_sequences(_causal(q, k, v, scale, window), query.shape[0])


def _sequences_to_rows(rows_BHTD: Tensor, length: int) -> Tensor:
    """Make each sequence a row: `[B * T / length, heads, length, head_dim]`."""
    return rows_BHTD.unflatten(2, (-1, length)).transpose(1, 2).flatten(0, 1)


def _rows_to_sequences(parts_NHLD: Tensor, rows: int) -> Tensor:
    """Reverse `_sequences_to_rows` and swap axes: `[rows, T, heads, head_dim]`, contiguous."""
    return parts_NHLD.transpose(1, 2).contiguous().unflatten(0, (rows, -1)).flatten(1, 2)


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """Compute attention of each token to itself and to earlier tokens of its sequence.

    All tensors are `[sequences, heads, length, head_dim]`; key and value may have fewer heads.

    Args:
        scale: factor of the scores; None: 1 / sqrt(head_dim).
        window: largest number of tokens that a token sees, itself included; None: no limit.
    """
    length = query.shape[2]
    if window is None or window >= length:
        shares = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(
            query, key, value, scale=scale, is_causal=True, enable_gqa=shares
        )
    # Block by block, because a mask of all tokens would grow with the square of the length.
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
