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

from roll.strategy.deepspeed.pieces import is_cut, own_part, padded_part, shape_of
from roll.strategy.names import distinct
from roll.weight_sync.manifest import Manifest, even_cuts, meta_of


def manifest(model: PreTrainedModel, dtype: torch.dtype) -> Manifest:
    """What `full_weights` will yield, in its order; reads no values and is not collective."""
    world = dist.get_world_size()
    metas, cuts = [], []
    for name, value in distinct(model):
        is_parameter = isinstance(value, torch.nn.Parameter)
        kind, shape = (dtype, shape_of(value)) if is_parameter else (value.dtype, value.shape)
        metas.append(meta_of(name, torch.empty(shape, dtype=kind, device="meta")))
        numel = shape.numel()
        cuts.append(even_cuts(numel, 1, world) if is_parameter else (0, *[numel] * world))
    return Manifest(tuple(metas), tuple(cuts))


def local_parts(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of each tensor, as `manifest` cuts it; not collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, value in distinct(model):
        tensor = value.detach()
        if is_cut(value):
            yield name, own_part(value)
        elif isinstance(value, torch.nn.Parameter):
            cuts = even_cuts(tensor.numel(), 1, world)
            yield name, tensor.reshape(-1)[cuts[rank] : cuts[rank + 1]]
        else:
            yield name, tensor if rank == 0 else tensor.new_empty(0)


def full_weights(
    model: PreTrainedModel, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Names and full tensors as in the Hugging Face checkpoint, one at a time; collective.

    Parameters come in `dtype`, the one the forward pass computes in. The tensors may share memory
    with the model: use them before the next update.
    """
    for name, value in distinct(model):
        tensor = whole(value, device)
        yield name, tensor.to(dtype) if isinstance(value, torch.nn.Parameter) else tensor


def whole(parameter: Tensor, device: torch.device) -> Tensor:
    """All of it; collective."""
    if not is_cut(parameter):
        return parameter.detach()
    part = padded_part(parameter).to(device)
    all_parts = part.new_empty(part.numel() * dist.get_world_size())
    dist.all_gather_into_tensor(all_parts, part)
    shape = shape_of(parameter)
    return all_parts[: shape.numel()].view(shape)
