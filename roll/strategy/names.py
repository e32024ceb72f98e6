"""The tensors of a Hugging Face model as its checkpoint names them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from roll.models import lora


def distinct(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Saved tensors, each under its first name only; those of an adapter left out."""
    seen: set[int] = set()
    for own, value in model.state_dict(keep_vars=True).items():
        name = lora.plain_name(own)
        if name is not None and id(value) not in seen:
            seen.add(id(value))
            yield name, value


def trained(model: PreTrainedModel) -> list[tuple[str, torch.nn.Parameter]]:
    """Parameters that learn, by their names in `model`: all, or an adapter's own."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def of_push(model: PreTrainedModel, *, adapter: bool) -> Iterator[tuple[str, Tensor]]:
    """What engines get: the model's tensors, or its adapter's by PEFT's names."""
    if not adapter:
        return distinct(model)
    return ((lora.peft_name(name), p) for name, p in trained(model))


def frozen(model: PreTrainedModel) -> frozenset[str]:
    """Names of the parameters that training leaves alone, an adapter included."""
    adapted = lora.deltas(model)
    return frozenset(
        name
        for name, value in distinct(model)
        if isinstance(value, torch.nn.Parameter) and not value.requires_grad and name not in adapted
    )
