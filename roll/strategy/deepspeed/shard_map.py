"""Map of the float32 master weights and AdamW moments that this rank holds, for every stage.

In stages 1 and 2 DeepSpeed concatenates the flattened parameters of a group and partitions the
result over the ranks. ZeRO-3 partitions each parameter. In both cases a rank holds one contiguous
range of the elements of a parameter, or none. Without ZeRO every rank holds all elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from roll.strategy.deepspeed.update import MOMENTS
from roll.strategy.tensor_names import trained

MASTER = "master"
KINDS = (MASTER, *MOMENTS)


@dataclass(frozen=True, slots=True)
class Piece:
    """Contiguous range of the elements of one parameter that this rank holds."""

    name: str
    """Name of the parameter in the Hugging Face model."""
    first: int
    """Offset of the range in the flattened parameter."""
    tensors: dict[str, Tensor]
    """Master weights and moments by kind (`KINDS`), flat float32 views of the tensors that AdamW
    updates."""

    @property
    def num_elements(self) -> int:
        return self.tensors[MASTER].numel()


def shape_of(parameter: Any) -> torch.Size:
    """Return the full shape of a parameter, also if ZeRO-3 has partitioned it."""
    shape: torch.Size = parameter.ds_shape if is_partitioned(parameter) else parameter.shape
    return shape


def is_partitioned(tensor: Tensor) -> bool:
    """Return whether ZeRO-3 has partitioned the tensor over the ranks."""
    return hasattr(tensor, "ds_tensor")


def padded_part(parameter: Any) -> Tensor:
    """Return this rank's flat part of a partitioned parameter. All parts are padded to one size."""
    part: Tensor = parameter.ds_tensor.data
    return part


def own_part(parameter: Any) -> Tensor:
    """Return this rank's flat part of a partitioned parameter, without the padding at the end."""
    _, count = own_run(parameter)
    return padded_part(parameter)[:count]


def own_run(parameter: Any) -> tuple[int, int]:
    """Return offset, in the flattened parameter, and length of the part that `own_part` returns."""
    numel, step = shape_of(parameter).numel(), padded_part(parameter).numel()
    first = min(dist.get_rank() * step, numel)
    return first, min(step, numel - first)


def flats(engine: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors that AdamW updates on this rank."""
    if engine.zero_optimization_stage() == 3:
        found: list[Tensor] = engine.optimizer.fp32_partitioned_groups_flat
        return found
    return [p for group in optimizer.param_groups for p in group["params"]]


def pieces(
    engine: Any, optimizer: torch.optim.Optimizer, model: PreTrainedModel
) -> Iterator[Piece]:
    """Yield this rank's pieces of the trained parameters, in the order of the model.

    Args:
        engine: DeepSpeed's engine.
        optimizer: AdamW with initialized moments; see `Update.start_moments`.
        model: the Hugging Face model in the engine.
    """
    for name, parameter in trained(model):
        run = _run(engine, optimizer, parameter)
        if run is None:
            continue
        flat, start, first, count = run
        kept = {MASTER: flat.detach(), **{kind: optimizer.state[flat][kind] for kind in MOMENTS}}
        yield Piece(name, first, {k: t.view(-1).narrow(0, start, count) for k, t in kept.items()})


def _run(
    engine: Any, optimizer: torch.optim.Optimizer, parameter: Any
) -> tuple[Tensor, int, int, int] | None:
    """Find the range of a parameter's elements that this rank holds; None if there is none.

    Returns:
        The tensor that AdamW updates, the offset of the range in this tensor, its offset in the
        flattened parameter, and its length.
    """
    zero = engine.optimizer
    if zero is optimizer:  # without ZeRO every rank updates all elements
        return parameter, 0, 0, parameter.numel()
    if is_partitioned(parameter):
        group, start, _ = zero.grad_position[zero.get_param_id(parameter)]
        first, count = own_run(parameter)
        return (zero.fp32_partitioned_groups_flat[group], start, first, count) if count else None
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    (flat,) = optimizer.param_groups[mapping.param_group_index]["params"]
    there, here = mapping.hp_fragment_address, mapping.lp_fragment_address
    return flat, there.start, here.start, there.numel


def refresh(engine: Any, optimizer: torch.optim.Optimizer, model: PreTrainedModel) -> None:
    """Copy the current master weights into the parameters of the model. Collective."""
    zero = engine.optimizer
    if zero is optimizer:
        return
    if engine.zero_optimization_stage() < 3:
        zero.update_lp_params()
        return
    zero.empty_partition_cache()
    held = {piece.name: piece for piece in pieces(engine, optimizer, model)}
    for name, parameter in trained(model):
        if name in held:
            own_part(parameter).copy_(held[name].tensors[MASTER])
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def whole_masters(
    engine: Any, optimizer: torch.optim.Optimizer, model: PreTrainedModel
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and full float32 master weights of the trained parameters. Collective."""
    held = {piece.name: piece for piece in pieces(engine, optimizer, model)}
    for name, parameter in trained(model):
        shape = shape_of(parameter)
        whole = torch.zeros(shape.numel(), device=engine.device)
        if name in held:
            piece = held[name]
            whole[piece.first :][: piece.num_elements] = piece.tensors[MASTER]
        if engine.optimizer is not optimizer:  # without ZeRO every rank has the full tensor
            dist.all_reduce(whole)
        yield name, whole.view(shape)
