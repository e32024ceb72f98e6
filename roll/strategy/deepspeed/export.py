"""Weights under Hugging Face names: what they are, who holds what, values.

Every rank answers for an equal run of elements of each parameter, as ZeRO-3 cuts it; below that
stage every rank has all, and passes on its run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from roll.models import lora
from roll.strategy.deepspeed.pieces import is_cut, own_part, padded_part, shape_of
from roll.strategy.names import distinct, of_push
from roll.weight_sync.manifest import Manifest, even_cuts, meta_of


def manifest(model: PreTrainedModel, dtype: torch.dtype, *, adapter: bool) -> Manifest:
    """What `local_parts` will yield, whole; reads no values and is not collective."""
    world = dist.get_world_size()
    metas, cuts = [], []
    for name, value in of_push(model, adapter=adapter):
        is_parameter = isinstance(value, torch.nn.Parameter)
        kind, shape = (dtype, shape_of(value)) if is_parameter else (value.dtype, value.shape)
        metas.append(meta_of(name, torch.empty(shape, dtype=kind, device="meta")))
        numel = shape.numel()
        cuts.append(even_cuts(numel, 1, world) if is_parameter else (0, *[numel] * world))
    return Manifest(tuple(metas), tuple(cuts))


def local_parts(model: PreTrainedModel, *, adapter: bool) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of each tensor, as `manifest` cuts it, adapters added; collective where
    there are some."""
    rank, world = dist.get_rank(), dist.get_world_size()
    adapted = lora.deltas(model)
    for name, value in of_push(model, adapter=adapter):
        tensor = value.detach()
        if not isinstance(value, torch.nn.Parameter):
            yield name, tensor if rank == 0 else tensor.new_empty(0)
            continue
        shape = shape_of(value)
        cuts = even_cuts(shape.numel(), 1, world)
        first, end = cuts[rank], cuts[rank + 1]
        part = own_part(value) if is_cut(value) else tensor.reshape(-1)[first:end]
        if name in adapted:
            part = plus_adapter(part, adapted[name], first)
        # A rank that has all of it, as one alone does, sends a tensor of its shape.
        yield name, part if part.numel() < shape.numel() else part.view(shape)


def full_weights(
    model: PreTrainedModel, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Names and full tensors as in the Hugging Face checkpoint, one at a time; collective.

    Parameters come in `dtype`, the one the forward pass computes in. The tensors may share memory
    with the model: use them before the next update.
    """
    adapted = lora.deltas(model)
    for name, value in distinct(model):
        tensor = whole(value, device)
        if name in adapted:
            tensor = plus_adapter(tensor.reshape(-1), adapted[name], 0).view(tensor.shape)
        yield name, tensor.to(dtype) if isinstance(value, torch.nn.Parameter) else tensor


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
