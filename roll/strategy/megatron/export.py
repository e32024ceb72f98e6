"""Weights under Hugging Face names, gathered bucket by bucket over all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from mcore_adapter.gather import export
from mcore_adapter.lora_io import merged
from roll.strategy.megatron.model import MegatronModel
from roll.weight_sync.manifest import Manifest

BUCKET_BYTES = 256 << 20
"""Of whole tensors that exist beside the model at once."""


def full_weights(
    model: MegatronModel, *, adapter: bool = False, wanted: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors in the order of the manifest, an adapter added; collective.

    Args:
        adapter: the factors of the adapter instead.
        wanted: whether this rank gets them; if not, it only takes part.
    """
    trained = model.trained
    return export(
        model.chunks,
        model.learns if adapter else model.table,
        model.sizes,
        change=(
            merged(model.chunks, trained.adapter, model.sizes)
            if trained is not None and not adapter
            else None
        ),
        wanted=wanted,
        bucket_bytes=BUCKET_BYTES,
    )


def manifest(model: MegatronModel, *, adapter: bool) -> Manifest:
    """What `parts` will yield, whole."""
    if not adapter:
        return model.manifest
    assert model.trained is not None  # only of a policy that trains one is it asked for
    return model.trained.manifest


def frozen(model: MegatronModel) -> frozenset[str]:
    """Names of what never changes: all that an adapter leaves as it is."""
    if model.trained is None:
        return frozenset()
    return frozenset(m.name for m in model.manifest.tensors) - model.trained.adapted


def parts(model: MegatronModel, *, adapter: bool) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of each tensor, as the manifest cuts it; collective.

    Ranks hold no runs of Hugging Face tensors (a tensor parallel rank has some heads of q, k and
    v), so every tensor is gathered, and each rank passes an equal part of it on.
    """
    rank, announced = dist.get_rank(), manifest(model, adapter=adapter)
    for position, (name, tensor) in enumerate(full_weights(model, adapter=adapter)):
        cuts = announced.cuts_of(position)
        part = tensor.view(-1)[cuts[rank] : cuts[rank + 1]]
        yield name, part if part.numel() < tensor.numel() else tensor
