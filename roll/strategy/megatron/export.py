"""Weights under Hugging Face names, gathered bucket by bucket over all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from mcore_adapter.gather import export
from roll.strategy.megatron.model import MegatronModel

BUCKET_BYTES = 256 << 20
"""Of whole tensors that exist beside the model at once."""


def full_weights(model: MegatronModel, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors in the order of `model.manifest`; collective.

    Args:
        wanted: whether this rank gets them; if not, it only takes part.
    """
    return export(
        model.chunks,
        model.table,
        model.sizes,
        wanted=wanted,
        bucket_bytes=BUCKET_BYTES,
    )


def parts(model: MegatronModel) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of each tensor, as the manifest cuts it; collective.

    Ranks hold no runs of Hugging Face tensors (a tensor parallel rank has some heads of q, k and
    v), so every tensor is gathered, and each rank passes an equal part of it on.
    """
    rank = dist.get_rank()
    for position, (name, tensor) in enumerate(full_weights(model)):
        cuts = model.manifest.cuts_of(position)
        part = tensor.view(-1)[cuts[rank] : cuts[rank + 1]]
        yield name, part if part.numel() < tensor.numel() else tensor
