"""A sharded model's weights under Hugging Face names: what they are, who holds what, values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from roll.core.errors import WeightSyncError
from roll.models import lora
from roll.models.checkpoint_tensors import Saved
from roll.strategy.fsdp2.mesh import TP
from roll.strategy.tensor_names import of_push
from roll.strategy.training import weight_export as outgoing
from roll.weight_sync.manifest import Manifest, even_cuts

SHAPE_OF = attrgetter("shape")
"""A DTensor's is that of the whole."""


def manifest(model: PreTrainedModel, saved: Saved | None, dtype: torch.dtype) -> Manifest:
    """What `local_parts` will yield, whole; reads no values and is not collective.

    A rank holds the rows that FSDP2 gave it. Where there are copies of the model, the first sends;
    what is not sharded comes from rank 0. What tensor parallel ranks share lies in no runs of rows;
    it is gathered, and each rank sends an equal part.

    Args:
        saved: how the checkpoint holds the model; None: the factors of the adapter instead.
    """
    return outgoing.manifest(of_push(model, saved, SHAPE_OF), dtype, _cuts)


def local_parts(model: PreTrainedModel, saved: Saved | None) -> Iterator[tuple[str, Tensor]]:
    """What this rank holds of each tensor, as it lies in the model, adapters added; collective
    where there are some, or tensor parallel ranks, or tensors that are no rows of the model's.

    Raises:
        WeightSyncError: a parameter is sharded along another axis than its rows.
    """
    adapted = lora.deltas(model)
    return outgoing.local_parts(
        of_push(model, saved, SHAPE_OF),
        saved,
        partial(_local_part, adapted),
        partial(_whole_part, adapted),
        _cuts,
    )


def full_weights(
    model: PreTrainedModel, saved: Saved, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Names and full tensors as in the Hugging Face checkpoint, one at a time; collective.

    Parameters come in `dtype`, the one the forward pass computes in. A tensor that goes by two
    names (tied embeddings) comes once, under its first name, as `save_pretrained` writes it. The
    tensors may share memory with the model: use them before the next update.
    """
    adapted = lora.deltas(model)

    def rounded(name: str, value: Tensor) -> Tensor:
        tensor = _with_adapter(adapted, name, value.detach())
        # Before it is gathered, which then takes half the memory.
        return whole(tensor.to(dtype) if isinstance(value, torch.nn.Parameter) else tensor)

    return outgoing.full_weights(of_push(model, saved, SHAPE_OF), saved, rounded, dtype)


def _cuts(value: Tensor) -> tuple[int, ...]:
    """Ranks of the first copy come first."""
    world = dist.get_world_size()
    if not isinstance(value, DTensor):
        return (0, *[value.numel()] * world)
    sharers = world if _is_cut(value) else value.device_mesh.size(-1)
    first = even_cuts(value.shape[0], value.shape[1:].numel(), sharers)
    return first + (value.numel(),) * (world - sharers)


def _is_cut(value: DTensor) -> bool:
    return TP in (value.device_mesh.mesh_dim_names or ())


def _with_adapter(adapted: dict[str, lora.Delta], name: str, value: Tensor) -> Tensor:
    return _merged(value.detach(), adapted[name]) if name in adapted else value


def _whole_part(adapted: dict[str, lora.Delta], name: str, value: Tensor) -> Tensor:
    return whole(_with_adapter(adapted, name, value).detach())


def _local_part(adapted: dict[str, lora.Delta], name: str, value: Tensor) -> Tensor:
    tensor = _with_adapter(adapted, name, value)
    if not isinstance(tensor, DTensor):
        return tensor.detach() if dist.get_rank() == 0 else tensor.new_empty(0)
    if _is_cut(tensor):
        cuts, rank = _cuts(tensor), dist.get_rank()
        # A copy, so that the whole tensor goes.
        return whole(tensor.detach()).view(-1)[cuts[rank] : cuts[rank + 1]].clone()
    if tensor.placements not in ((Shard(0),), (Replicate(), Shard(0))):
        raise WeightSyncError(
            f"{name!r} is placed as {tensor.placements}; weights are sent by rows, "
            "(Shard(0),), of one copy"
        )
    local = _local(tensor)
    return local if dist.get_rank() < tensor.device_mesh.size(-1) else local[:0]


@torch.no_grad()
def _local(tensor: DTensor) -> Tensor:
    """This rank's part as it lies in the model. Under autograd, and by `detach`, DTensor makes new
    ones, which takes longer than copying a small part."""
    return tensor.to_local()


def whole(tensor: Tensor) -> Tensor:
    """All of it; collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    if _is_cut(tensor):
        # First over the shards, which lie within the parts of tensor parallel ranks; at once, the
        # order of the two would be DTensor's choice, of which it warns.
        *shards, of_tp = tensor.placements
        tensor = tensor.redistribute(placements=[*[Replicate()] * len(shards), of_tp])
    return tensor.full_tensor()


def _merged(weight: Tensor, delta: lora.Delta) -> Tensor:
    """The weight with its adapter, sharded as it was; collective."""
    a_RI = whole(delta.a_RI.detach())
    b_OR = delta.b_OR.detach()
    if isinstance(weight, DTensor) and isinstance(b_OR, DTensor):
        # Rows of B lie where the rows of the weight do.
        local = torch.addmm(weight.to_local(), b_OR.to_local(), a_RI, alpha=delta.scale)
        return DTensor.from_local(
            local,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
    return torch.addmm(weight, b_OR, a_RI, alpha=delta.scale)
