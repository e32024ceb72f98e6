"""Weights on their way out of a model that ranks share: what they are, who holds what, values.

A tensor of the checkpoint that is a run of elements of one of the model's leaves from where it
lies. What is made of tensors by other means is gathered, and each rank passes on an equal part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from roll.models.checkpoint_tensors import Saved
from roll.strategy.tensor_names import Outgoing
from roll.weight_sync.manifest import Manifest, TensorMeta, even_cuts

CutsOf = Callable[[Tensor], tuple[int, ...]]
"""Where in the flattened whole tensor the ranks' parts begin, and its size at the end."""
PartOf = Callable[[str, Tensor], Tensor]
"""Of a tensor of the model, which it is given by name, what this rank holds, or all of it; with
its adapter. May be collective."""


def manifest(outgoing: Iterable[Outgoing], dtype: torch.dtype, cuts_of: CutsOf) -> Manifest:
    """What `local_parts` will yield, whole; reads no values and is not collective.

    Args:
        dtype: in which parameters leave.
    """
    metas, cuts = [], []
    for bundle, values in outgoing:
        kind = str(_dtype(values[0], dtype)).removeprefix("torch.")
        for tensor in bundle.saved:
            size = tensor.shape.numel()
            metas.append(TensorMeta(tensor.name, tuple(tensor.shape), kind))
            cuts.append(
                _even(size)
                if tensor.first is None or not bundle.are_runs
                else _within(cuts_of(values[0]), tensor.first, size)
            )
    return Manifest(tuple(metas), tuple(cuts))


def local_parts(
    outgoing: Iterable[Outgoing], saved: Saved | None, local: PartOf, whole: PartOf, cuts_of: CutsOf
) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of each tensor, as `manifest` cuts it."""
    rank = dist.get_rank()
    for bundle, values in outgoing:
        if bundle.are_runs:
            (source,), (value,) = bundle.sources, values
            own, cuts = local(source, value).reshape(-1), cuts_of(value)
            for tensor in bundle.saved:
                assert tensor.first is not None
                ends = _within(cuts, tensor.first, tensor.shape.numel())
                begin = tensor.first + ends[rank] - cuts[rank]
                part = own[max(begin, 0) :][: ends[rank + 1] - ends[rank]]
                yield tensor.name, _shaped(part, tensor.shape)
            continue
        assert saved is not None  # factors are runs
        tensors = {name: whole(name, v) for name, v in zip(bundle.sources, values, strict=True)}
        for tensor, made in zip(bundle.saved, saved.take_apart(bundle, tensors), strict=True):
            cuts = _even(tensor.shape.numel())
            part = made.reshape(-1)[cuts[rank] : cuts[rank + 1]]
            yield tensor.name, _shaped(part, tensor.shape)


def full_weights(
    outgoing: Iterable[Outgoing], saved: Saved, whole: PartOf, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors as in the checkpoint, parameters in `dtype`; collective where `whole`
    is. They may share memory with the model: use them before the next update."""
    for bundle, values in outgoing:
        tensors = {
            name: whole(name, value).to(_dtype(value, dtype))
            for name, value in zip(bundle.sources, values, strict=True)
        }
        for tensor, made in zip(bundle.saved, saved.take_apart(bundle, tensors), strict=True):
            yield tensor.name, made


def _dtype(value: Tensor, of_parameters: torch.dtype) -> torch.dtype:
    return of_parameters if isinstance(value, torch.nn.Parameter) else value.dtype


def _even(size: int) -> tuple[int, ...]:
    return even_cuts(size, 1, dist.get_world_size())


def _within(cuts: tuple[int, ...], first: int, size: int) -> tuple[int, ...]:
    """Cuts of the run of `size` elements that begins at `first`."""
    return tuple(min(max(cut - first, 0), size) for cut in cuts)


def _shaped(part: Tensor, shape: torch.Size) -> Tensor:
    """A rank that has all of it, as one alone does, sends a tensor of its shape."""
    return part.view(shape) if part.numel() == shape.numel() else part
