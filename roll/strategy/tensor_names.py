"""Names of the tensors of a Hugging Face model, in the model and in its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from roll.models import lora
from roll.models.checkpoint_tensors import Bundle, CheckpointLayout, SavedTensor

ShapeOf = Callable[[Tensor], torch.Size]
"""Returns the full shape of a tensor, also if this rank holds only a part of the tensor."""
Outgoing = tuple[Bundle, list[Tensor]]
"""Checkpoint tensors that are exported together, and the model's tensors that they are made
from."""


def distinct(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each tensor of the model, without those of an adapter.

    A tensor with several names (tied weights) is yielded once, under its first name.
    """
    seen: set[int] = set()
    for own, value in model.state_dict(keep_vars=True).items():
        name = lora.plain_name(own)
        if name is not None and id(value) not in seen:
            seen.add(id(value))
            yield name, value


def trained(model: PreTrainedModel) -> list[tuple[str, torch.nn.Parameter]]:
    """List the trainable parameters with their names in `model`: all of them, or an adapter's."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def saved(model: PreTrainedModel, shape_of: ShapeOf) -> CheckpointLayout:
    """Build the map from the model's tensors, without an adapter's, to those of its checkpoint."""
    return CheckpointLayout(model, {name: shape_of(value) for name, value in distinct(model)})


def push_tensors(
    model: PreTrainedModel, saved: CheckpointLayout | None, shape_of: ShapeOf
) -> Iterator[Outgoing]:
    """Yield the tensors that a push sends to engines, with the tensors they are made from.

    Args:
        saved: result of the function `saved` for the model. None: yield the LoRA factors of the
            model's adapter instead, under PEFT's names.
    """
    if saved is None:
        for name, value in trained(model):
            factor = SavedTensor(lora.peft_name(name), shape_of(value), first=0)
            yield Bundle((name,), (factor,)), [value]
        return
    own = dict(distinct(model))
    for bundle in saved.bundles:
        yield bundle, [own[name] for name in bundle.sources]


def frozen(model: PreTrainedModel, saved: CheckpointLayout) -> frozenset[str]:
    """Return the checkpoint names of the parameters that training never changes.

    A weight that an adapter adapts is not among them, because it is exported with the adapter added
    to it.
    """
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
