"""Export of the weights of a Megatron-Core model under Hugging Face names.

Tensors are gathered over all ranks, bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from mcore_adapter.gather import export, weight
from mcore_adapter.lora_io import merged
from mcore_adapter.modeling.mtp import mtp_tensors
from roll.strategy.megatron.model import MegatronModel
from roll.weight_sync.manifest import Manifest

BUCKET_BYTES = 256 << 20
"""Size of a bucket in bytes: full tensors that exist besides the model at the same time."""


def full_weights(
    model: MegatronModel, *, adapter: bool = False, further: bool = False, wanted: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and full tensors in the order of the manifest, with the adapter added.

    Collective: all ranks exhaust the iterator together.

    Args:
        adapter: yield only the LoRA factors of the adapter.
        further: also yield the layers that predict further tokens, if the model has them.
        wanted: False if this rank only takes part in the collectives and gets no tensors.
    """
    trained = model.trained
    left_out = set() if further else {id(tensor) for tensor in mtp_tensors(model.chunks)}
    return export(
        model.chunks,
        model.learns if adapter else model.table,
        model.sizes,
        value=lambda tensor: None if id(tensor) in left_out else weight(tensor),
        change=(
            merged(model.chunks, trained.adapter, model.sizes)
            if trained is not None and not adapter
            else None
        ),
        wanted=wanted,
        bucket_bytes=BUCKET_BYTES,
    )


def manifest(model: MegatronModel, *, adapter: bool) -> Manifest:
    """Return the manifest of the tensors that `parts` yields.

    Args:
        adapter: describe only the LoRA factors of the adapter.
    """
    if not adapter:
        return model.manifest
    assert model.trained is not None  # `adapter` is set only if the model trains an adapter
    return model.trained.manifest


def frozen(model: MegatronModel) -> frozenset[str]:
    """Return the names in the manifest whose values never change.

    These are the weights without an adapter, if the model trains an adapter; otherwise those of
    frozen parts.
    """
    names = frozenset(meta.name for meta in model.manifest.tensors)
    return model.frozen & names if model.trained is None else names - model.trained.adapted


def parts(model: MegatronModel, *, adapter: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and this rank's part of each tensor, as the manifest divides it. Collective.

    Ranks do not hold contiguous ranges of Hugging Face tensors: a tensor parallel rank has some
    heads of q, k and v in one tensor. So every tensor is gathered, and each rank yields an equal
    part.
    """
    rank, announced = dist.get_rank(), manifest(model, adapter=adapter)
    for position, (name, tensor) in enumerate(full_weights(model, adapter=adapter)):
        cuts = announced.cuts_of(position)
        part = tensor.view(-1)[cuts[rank] : cuts[rank + 1]]
        yield name, part if part.numel() < tensor.numel() else tensor
