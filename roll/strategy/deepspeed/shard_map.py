"""What of the float32 masters and AdamW's moments this rank holds, whatever the stage.

DeepSpeed lays the parameters of a group end to end and cuts the row over the ranks; ZeRO-3 cuts
each parameter. Either way a rank holds one run of elements of a parameter, or none.
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
    """A run of elements of one parameter."""

    name: str
    """Of the parameter, in the Hugging Face model."""
    first: int
    """Where it begins, counted through the flattened parameter."""
    tensors: dict[str, Tensor]
    """By kind; flat views of what DeepSpeed and AdamW compute with."""

    @property
    def num_elements(self) -> int:
        return self.tensors[MASTER].numel()


def shape_of(parameter: Any) -> torch.Size:
    """Its whole shape, also where ZeRO-3 has cut it."""
    shape: torch.Size = parameter.ds_shape if is_cut(parameter) else parameter.shape
    return shape


def is_cut(tensor: Tensor) -> bool:
    """Whether ZeRO-3 has cut it over the ranks."""
    return hasattr(tensor, "ds_tensor")


def padded_part(parameter: Any) -> Tensor:
    """What this rank has of a cut parameter, flat; of the same size on every rank."""
    part: Tensor = parameter.ds_tensor.data
    return part


def own_part(parameter: Any) -> Tensor:
    """The same without the padding at the end."""
    _, count = own_run(parameter)
    return padded_part(parameter)[:count]


def own_run(parameter: Any) -> tuple[int, int]:
    """Where in the flattened parameter that begins, and its length."""
    numel, step = shape_of(parameter).numel(), padded_part(parameter).numel()
    first = min(dist.get_rank() * step, numel)
    return first, min(step, numel - first)


def flats(engine: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that AdamW updates on this rank."""
    if engine.zero_optimization_stage() == 3:
        found: list[Tensor] = engine.optimizer.fp32_partitioned_groups_flat
        return found
    return [p for group in optimizer.param_groups for p in group["params"]]


def pieces(
    engine: Any, optimizer: torch.optim.Optimizer, model: PreTrainedModel
) -> Iterator[Piece]:
    """This rank's of the parameters that learn, in the order of the model.

    Args:
        optimizer: that has moments; see `Update.start_moments`.
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
    """The flat tensor, where in it the run begins, where in the parameter, and its length."""
    zero = engine.optimizer
    if zero is optimizer:  # no ZeRO: every rank updates all
        return parameter, 0, 0, parameter.numel()
    if is_cut(parameter):
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
    """Let the model compute with the masters as they are now; collective."""
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
    """Float32 masters of what learns, whole on every rank, one at a time; collective."""
    held = {piece.name: piece for piece in pieces(engine, optimizer, model)}
    for name, parameter in trained(model):
        shape = shape_of(parameter)
        whole = torch.zeros(shape.numel(), device=engine.device)
        if name in held:
            piece = held[name]
            whole[piece.first :][: piece.num_elements] = piece.tensors[MASTER]
        if engine.optimizer is not optimizer:  # else every rank has all of it
            dist.all_reduce(whole)
        yield name, whole.view(shape)
