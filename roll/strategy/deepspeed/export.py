"""Export of the weights of a DeepSpeed model under Hugging Face names.

Offers the manifest, the parts of each rank, and the full tensors. Every rank exports an equal
contiguous range of the elements of each parameter, as ZeRO-3 partitions the parameter. In lower
stages every rank holds the full parameter and exports its range of the elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from roll.models import lora
from roll.models.checkpoint_tensors import CheckpointLayout
from roll.strategy.deepspeed.shard_map import is_partitioned, own_part, padded_part, shape_of
from roll.strategy.tensor_names import push_tensors
from roll.strategy.training import weight_export as outgoing
from roll.weight_sync.manifest import Manifest, even_cuts


def manifest(
    model: PreTrainedModel, saved: CheckpointLayout | None, dtype: torch.dtype
) -> Manifest:
    """Describe the tensors that `local_parts` yields, and which part each rank sends.

    Reads no values and is not collective.

    Args:
        saved: how the checkpoint holds the model. None: describe only the LoRA factors of the
            model's adapter.
        dtype: dtype that parameters have in the manifest.
    """
    return outgoing.manifest(push_tensors(model, saved, shape_of), dtype, _cuts)


def local_parts(
    model: PreTrainedModel, saved: CheckpointLayout | None, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and this rank's part of each tensor, with the adapter added.

    Collective if the model has an adapter, or if some checkpoint tensor is not a contiguous range
    of a tensor of the model.

    Args:
        saved: as for `manifest`.
        device: device on which full tensors are gathered.
    """
    adapted = lora.deltas(model)

    def local(name: str, value: Tensor) -> Tensor:
        rank, cuts = dist.get_rank(), _cuts(value)
        first, end = cuts[rank], cuts[rank + 1]
        part = own_part(value) if is_partitioned(value) else value.detach().reshape(-1)[first:end]
        return plus_adapter(part, adapted[name], first) if name in adapted else part

    return outgoing.local_parts(
        push_tensors(model, saved, shape_of),
        saved,
        local,
        partial(_whole_of, adapted, device),
        _cuts,
    )


def full_weights(
    model: PreTrainedModel, saved: CheckpointLayout, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and full tensors as in the Hugging Face checkpoint, one at a time. Collective.

    Parameters are converted to `dtype`. The tensors may share memory with the model: use them
    before the next update.
    """
    whole_of = partial(_whole_of, lora.deltas(model), device)
    return outgoing.full_weights(push_tensors(model, saved, shape_of), saved, whole_of, dtype)


def _cuts(value: Tensor) -> tuple[int, ...]:
    """Return the offsets of the ranks' parts, and the size; rank 0 exports all of a buffer."""
    world = dist.get_world_size()
    if not isinstance(value, torch.nn.Parameter):
        return (0, *[value.numel()] * world)
    return even_cuts(shape_of(value).numel(), 1, world)


def _whole_of(
    adapted: Mapping[str, lora.Delta], device: torch.device, name: str, value: Tensor
) -> Tensor:
    """Return a full tensor, with its adapter added if it is adapted. Collective as `whole`."""
    tensor = whole(value, device)
    if name not in adapted:
        return tensor
    return plus_adapter(tensor.reshape(-1), adapted[name], 0).view(tensor.shape)


def plus_adapter(part: Tensor, delta: lora.Delta, first: int) -> Tensor:
    """Add the adapter to a contiguous range of a weight; return the sum in float32. Collective.

    The sum is float32 because an adapter is small compared with its weight; the two are rounded
    only together.

    Args:
        part: elements of the weight, flat.
        first: offset in the flattened weight at which `part` begins.
    """
    a_RI, b_OR = (whole(p, part.device).float() for p in (delta.a_RI, delta.b_OR))
    width, end = a_RI.shape[1], first + part.numel()
    rows = slice(first // width, -(-end // width))
    product = (b_OR[rows] @ a_RI).view(-1)[first - rows.start * width :][: part.numel()]
    return torch.add(part.float(), product, alpha=delta.scale)


def whole(parameter: Tensor, device: torch.device) -> Tensor:
    """Return the full parameter. If ZeRO-3 has partitioned it: gather on `device`, collective."""
    if not is_partitioned(parameter):
        return parameter.detach()
    part = padded_part(parameter).to(device)
    all_parts = part.new_empty(part.numel() * dist.get_world_size())
    dist.all_gather_into_tensor(all_parts, part)
    shape = shape_of(parameter)
    return all_parts[: shape.numel()].view(shape)
