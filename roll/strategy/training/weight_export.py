"""Export of the weights of a sharded model: manifest, parts of each rank, full tensors.

A checkpoint tensor that is a contiguous range of one tensor of the model is exported from the ranks
that hold the elements. Any other checkpoint tensor is converted from gathered full tensors, and
each rank exports an equal part of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from roll.models.checkpoint_tensors import CheckpointLayout
from roll.strategy.tensor_names import Outgoing
from roll.weight_sync.manifest import Manifest, TensorMeta, even_cuts

CutsOf = Callable[[Tensor], tuple[int, ...]]
"""Returns the offsets in the flattened full tensor at which the ranks' parts begin, followed by the
number of elements of the full tensor."""
PartOf = Callable[[str, Tensor], Tensor]
"""Returns this rank's part of a tensor of the model, or the full tensor, with the adapter added.
Arguments: name of the tensor in the model, and its value on this rank. May be collective."""


def manifest(outgoing: Iterable[Outgoing], dtype: torch.dtype, cuts_of: CutsOf) -> Manifest:
    """Describe the tensors that `local_parts` yields, and which part each rank holds.

    Reads no values and is not collective.

    Args:
        dtype: dtype that exported parameters have. Buffers keep their own.
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
    outgoing: Iterable[Outgoing],
    saved: CheckpointLayout | None,
    local: PartOf,
    whole: PartOf,
    cuts_of: CutsOf,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and this rank's part of each tensor, as `manifest` divides the tensors.

    A part that is the full tensor has its shape; any other part is flat, and may be empty.

    Args:
        outgoing: as given to `manifest`.
        saved: how the checkpoint holds the model; None if `outgoing` holds an adapter's factors.
        local: returns this rank's part of a tensor.
        whole: returns the full tensor.
        cuts_of: as given to `manifest`.
    """
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
        assert saved is not None  # factors of an adapter are always contiguous ranges
        tensors = {name: whole(name, v) for name, v in zip(bundle.sources, values, strict=True)}
        for tensor, made in zip(bundle.saved, saved.to_checkpoint(bundle, tensors), strict=True):
            cuts = _even(tensor.shape.numel())
            part = made.reshape(-1)[cuts[rank] : cuts[rank + 1]]
            yield tensor.name, _shaped(part, tensor.shape)


def full_weights(
    outgoing: Iterable[Outgoing], saved: CheckpointLayout, whole: PartOf, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and full tensors as in the checkpoint, with parameters in `dtype`.

    Collective if `whole` is. The tensors may share memory with the model: use them before the next
    update.
    """
    for bundle, values in outgoing:
        tensors = {
            name: whole(name, value).to(_dtype(value, dtype))
            for name, value in zip(bundle.sources, values, strict=True)
        }
        for tensor, made in zip(bundle.saved, saved.to_checkpoint(bundle, tensors), strict=True):
            yield tensor.name, made


def _dtype(value: Tensor, of_parameters: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor is exported; a buffer keeps its own."""
    return of_parameters if isinstance(value, torch.nn.Parameter) else value.dtype


def _even(size: int) -> tuple[int, ...]:
    """Return cuts that divide `size` elements equally among all ranks."""
    return even_cuts(size, 1, dist.get_world_size())


def _within(cuts: tuple[int, ...], first: int, size: int) -> tuple[int, ...]:
    """Convert cuts of a tensor to cuts of its range of `size` elements that begins at `first`."""
    return tuple(min(max(cut - first, 0), size) for cut in cuts)


def _shaped(part: Tensor, shape: torch.Size) -> Tensor:
    """Restore the shape of a part that is the full tensor; other parts stay flat."""
    return part.view(shape) if part.numel() == shape.numel() else part
