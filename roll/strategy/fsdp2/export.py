"""Export of the weights of an FSDP2 model under Hugging Face names.

Offers the manifest, the parts of each rank, and the full tensors.
"""

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
from roll.models.checkpoint_tensors import CheckpointLayout
from roll.strategy.fsdp2.expert_parallel import exchanged
from roll.strategy.fsdp2.mesh import EP, TP
from roll.strategy.tensor_names import push_tensors
from roll.strategy.training import weight_export as outgoing
from roll.weight_sync.manifest import Manifest, even_cuts

SHAPE_OF = attrgetter("shape")
"""Returns the full shape of a tensor: a DTensor's `shape` is that of the full tensor."""


def manifest(
    model: PreTrainedModel, saved: CheckpointLayout | None, dtype: torch.dtype
) -> Manifest:
    """Describe the tensors that `local_parts` yields, and which part each rank sends.

    Reads no values and is not collective. A rank sends the rows that FSDP2 gave it. If there are
    several copies of the model, only the first copy sends. Rank 0 sends tensors that are not
    sharded. Tensors cut by tensor parallelism are gathered, as ranks do not hold contiguous rows of
    them; each rank then sends an equal part. Experts that ranks share change places first, as the
    ranks do not hold them in the order of the ranks.

    Args:
        saved: how the checkpoint holds the model. None: describe only the LoRA factors of the
            model's adapter.
        dtype: dtype that parameters have in the manifest.
    """
    return outgoing.manifest(push_tensors(model, saved, SHAPE_OF), dtype, _cuts)


def local_parts(
    model: PreTrainedModel, saved: CheckpointLayout | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and this rank's part of each tensor, in the model's dtype, adapter added.

    Collective if the model has an adapter or tensor or expert parallel ranks, or if some checkpoint
    tensor is not a contiguous range of a tensor of the model.

    Args:
        saved: as for `manifest`.

    Raises:
        WeightSyncError: a parameter is sharded along another axis than its rows.
    """
    adapted = lora.deltas(model)
    return outgoing.local_parts(
        push_tensors(model, saved, SHAPE_OF),
        saved,
        partial(_local_part, adapted),
        lambda name, value: whole(_with_adapter(adapted, name, value).detach()),
        _cuts,
    )


def full_weights(
    model: PreTrainedModel, saved: CheckpointLayout, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and full tensors as in the Hugging Face checkpoint, one at a time. Collective.

    Parameters are converted to `dtype`. A tensor with two names (tied embeddings) is yielded once,
    under its first name, as `save_pretrained` writes it. The tensors may share memory with the
    model: use them before the next update.
    """
    adapted = lora.deltas(model)

    def rounded(name: str, value: Tensor) -> Tensor:
        tensor = _with_adapter(adapted, name, value.detach())
        # Convert before gathering: in a 16-bit dtype the gathered tensor takes half the memory.
        return whole(tensor.to(dtype) if isinstance(value, torch.nn.Parameter) else tensor)

    return outgoing.full_weights(push_tensors(model, saved, SHAPE_OF), saved, rounded, dtype)


def _cuts(value: Tensor) -> tuple[int, ...]:
    """Return the offsets of the ranks' parts in the flattened full tensor, and its size at the end.

    The ranks of the first copy have the lowest numbers, so the parts of all later ranks are empty.
    """
    world = dist.get_world_size()
    if not isinstance(value, DTensor):
        return (0, *[value.numel()] * world)
    mesh, axis = value.device_mesh, _axis(value)
    sharers = world if axis == TP else mesh.size(-1)
    if axis == EP:
        sharers *= mesh.size(-2)
    first = even_cuts(value.shape[0], value.shape[1:].numel(), sharers)
    return first + (value.numel(),) * (world - sharers)


def _axis(value: DTensor) -> str | None:
    """Return the axis of ranks that has cut the tensor before FSDP; None if there is none."""
    names = value.device_mesh.mesh_dim_names or ()
    return next((axis for axis in (TP, EP) if axis in names), None)


def _with_adapter(adapted: dict[str, lora.Delta], name: str, value: Tensor) -> Tensor:
    """Return a tensor of the model. If it is adapted, add its adapter, which is collective."""
    return _merged(value.detach(), adapted[name]) if name in adapted else value


def _local_part(adapted: dict[str, lora.Delta], name: str, value: Tensor) -> Tensor:
    """Return this rank's elements of a tensor, adapter added; none if other ranks send them all."""
    tensor = _with_adapter(adapted, name, value)
    if not isinstance(tensor, DTensor):
        return tensor.detach() if dist.get_rank() == 0 else tensor.new_empty(0)
    if _axis(tensor) == EP:
        return _in_order(tensor)
    if _axis(tensor) == TP:
        cuts, rank = _cuts(tensor), dist.get_rank()
        # A copy, so that the memory of the full tensor is freed.
        return whole(tensor.detach()).view(-1)[cuts[rank] : cuts[rank + 1]].clone()
    if tensor.placements not in ((Shard(0),), (Replicate(), Shard(0))):
        raise WeightSyncError(
            f"{name!r} is placed as {tensor.placements}; weights are sent by rows, "
            "(Shard(0),), of one copy"
        )
    part = local(tensor)
    return part if dist.get_rank() < tensor.device_mesh.size(-1) else part[:0]


def _in_order(experts: DTensor) -> Tensor:
    """Return this rank's elements of the experts of a layer, in the order of the ranks. Collective.

    Ranks that share experts are neighbours, while neighbouring experts are on ranks far apart.
    """
    mesh, cuts = experts.device_mesh, _cuts(experts)
    row, parts = experts.shape[1:].numel(), mesh.size(-1)
    number = experts.shape[0] // parts
    inner = even_cuts(number, row, mesh.size(-2))
    held = [
        (number * row * part + inner[shard], number * row * part + inner[shard + 1])
        for shard in range(mesh.size(-2))
        for part in range(parts)
    ]
    held += [(0, 0)] * (dist.get_world_size() - len(held))  # later copies send nothing

    def common(holder: int, taker: int) -> tuple[int, int]:
        (first, end), low, high = held[holder], cuts[taker], cuts[taker + 1]
        return max(first, low), max(min(end, high), max(first, low))

    me, ranks = dist.get_rank(), range(dist.get_world_size())
    sent = [end - first for first, end in (common(me, taker) for taker in ranks)]
    received = [common(holder, me) for holder in ranks]
    own = local(experts).reshape(-1)[: sum(sent)]
    found = exchanged(own, sent, [end - first for first, end in received])
    pieces = zip(received, found.split([end - first for first, end in received]), strict=True)
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])])


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without copying; all of one that is not sharded.

    Autograd is off, because under autograd, and in `detach`, DTensor creates new DTensors, which
    takes longer than copying a small part.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Gather the full tensor. Collective if the tensor is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    if _axis(tensor) is not None:
        # Gather the FSDP shards first, as they subdivide the parts of the other axis.
        # In one step DTensor would choose the order of the two axes, with a warning.
        *shards, of_axis = tensor.placements
        tensor = tensor.redistribute(placements=[*[Replicate()] * len(shards), of_axis])
    return tensor.full_tensor()


def _merged(weight: Tensor, delta: lora.Delta) -> Tensor:
    """Add the adapter's product to a weight, which stays sharded as before. Collective."""
    a_RI = whole(delta.a_RI.detach())
    b_OR = delta.b_OR.detach()
    if isinstance(weight, DTensor) and isinstance(b_OR, DTensor):
        # The rows of B are on the same ranks as the rows of the weight.
        merged = torch.addmm(weight.to_local(), b_OR.to_local(), a_RI, alpha=delta.scale)
        return DTensor.from_local(
            merged,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
    return torch.addmm(weight, b_OR, a_RI, alpha=delta.scale)
