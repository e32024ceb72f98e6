"""The tensors of a Hugging Face model, under the names of its modules and of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from roll.models import lora
from roll.models.checkpoint_tensors import Bundle, Saved, SavedTensor

ShapeOf = Callable[[Tensor], torch.Size]
"""The whole shape of a tensor of which a rank may hold a part."""
Outgoing = tuple[Bundle, list[Tensor]]
"""Tensors that leave together, and the model's own that they are made of."""


def distinct(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors, each under its first name only; those of an adapter left out."""
    seen: set[int] = set()
    for own, value in model.state_dict(keep_vars=True).items():
        name = lora.plain_name(own)
        if name is not None and id(value) not in seen:
            seen.add(id(value))
            yield name, value


def trained(model: PreTrainedModel) -> list[tuple[str, torch.nn.Parameter]]:
    """Parameters that learn, by their names in `model`: all, or an adapter's own."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def saved(model: PreTrainedModel, shape_of: ShapeOf) -> Saved:
    """How the model's checkpoint holds its tensors, those of an adapter left out."""
    return Saved(model, {name: shape_of(value) for name, value in distinct(model)})


def of_push(model: PreTrainedModel, saved: Saved | None, shape_of: ShapeOf) -> Iterator[Outgoing]:
    """What engines get.

    Args:
        saved: of the model; None: the factors of its adapter instead, by PEFT's names.
    """
    if saved is None:
        for name, value in trained(model):
            factor = SavedTensor(lora.peft_name(name), shape_of(value), first=0)
            yield Bundle((name,), (factor,)), [value]
        return
    own = dict(distinct(model))
    for bundle in saved.bundles:
        yield bundle, [own[name] for name in bundle.sources]


def frozen(model: PreTrainedModel, saved: Saved) -> frozenset[str]:
    """Names in the checkpoint of the parameters that training leaves alone, an adapter included."""
    adapted = lora.deltas(model)
    never = {
        name
        for name, value in distinct(model)
        if isinstance(value, torch.nn.Parameter) and not value.requires_grad and name not in adapted
    }
    return frozenset(
        tensor.name
        for bundle in saved.bundles
        if never.issuperset(bundle.sources)
        for tensor in bundle.saved
    )
