"""Weights under Hugging Face names: what they are, who holds what, values.

Every rank answers for an equal run of elements of each parameter, as ZeRO-3 cuts it; below that
stage every rank has all, and passes on its run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from roll.models import lora
from roll.models.checkpoint_tensors import Saved
from roll.strategy.deepspeed.shard_map import is_cut, own_part, padded_part, shape_of
from roll.strategy.tensor_names import of_push
from roll.strategy.training import weight_export as outgoing
from roll.weight_sync.manifest import Manifest, even_cuts


def manifest(model: PreTrainedModel, saved: Saved | None, dtype: torch.dtype) -> Manifest:
    """What `local_parts` will yield, whole; reads no values and is not collective.

    Args:
        saved: how the checkpoint holds the model; None: the factors of the adapter instead.
    """
    return outgoing.manifest(of_push(model, saved, shape_of), dtype, _cuts)


def local_parts(
    model: PreTrainedModel, saved: Saved | None, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of each tensor, as `manifest` cuts it, adapters added; collective where
    there are some, or tensors that are no runs of elements of the model's."""
    adapted = lora.deltas(model)

    def local(name: str, value: Tensor) -> Tensor:
        rank, cuts = dist.get_rank(), _cuts(value)
        first, end = cuts[rank], cuts[rank + 1]
        part = own_part(value) if is_cut(value) else value.detach().reshape(-1)[first:end]
        return plus_adapter(part, adapted[name], first) if name in adapted else part

    return outgoing.local_parts(
        of_push(model, saved, shape_of), saved, local, partial(_whole_of, adapted, device), _cuts
    )


def full_weights(
    model: PreTrainedModel, saved: Saved, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Names and full tensors as in the Hugging Face checkpoint, one at a time; collective.

    Parameters come in `dtype`, the one the forward pass computes in. The tensors may share memory
    with the model: use them before the next update.
    """
    whole_of = partial(_whole_of, lora.deltas(model), device)
    return outgoing.full_weights(of_push(model, saved, shape_of), saved, whole_of, dtype)


def _cuts(value: Tensor) -> tuple[int, ...]:
    world = dist.get_world_size()
    if not isinstance(value, torch.nn.Parameter):
        return (0, *[value.numel()] * world)
    return even_cuts(shape_of(value).numel(), 1, world)


def _whole_of(
    adapted: Mapping[str, lora.Delta], device: torch.device, name: str, value: Tensor
) -> Tensor:
    tensor = whole(value, device)
    if name not in adapted:
        return tensor
    return plus_adapter(tensor.reshape(-1), adapted[name], 0).view(tensor.shape)


def plus_adapter(part: Tensor, delta: lora.Delta, first: int) -> Tensor:
    """A run of the elements of a weight, flat, with its adapter; collective.

    Added in float32: an adapter is small beside its weight, and is rounded together with it.

    Args:
        first: where in the flattened weight the run begins.
    """
    a_RI, b_OR = (whole(p, part.device).float() for p in (delta.a_RI, delta.b_OR))
    width, end = a_RI.shape[1], first + part.numel()
    rows = slice(first // width, -(-end // width))
    product = (b_OR[rows] @ a_RI).view(-1)[first - rows.start * width :][: part.numel()]
    return torch.add(part.float(), product, alpha=delta.scale)


def whole(parameter: Tensor, device: torch.device) -> Tensor:
    """All of it; collective where ZeRO-3 has cut it, and then on `device`."""
    if not is_cut(parameter):
        return parameter.detach()
    part = padded_part(parameter).to(device)
    all_parts = part.new_empty(part.numel() * dist.get_world_size())
    dist.all_gather_into_tensor(all_parts, part)
    shape = shape_of(parameter)
    return all_parts[: shape.numel()].view(shape)
