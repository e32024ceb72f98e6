"""Optimizer steps on whole parameters, of which every rank takes a part.

Some optimizers look at a whole matrix: the singular values of its gradient, the means of its rows
and columns, its norm. Their results on shards would not be those of the matrix, and in products
over shards sums of bfloat16 would be rounded in another order. So each parameter has an owner, a
rank that keeps the optimizer's state of this parameter and takes its steps: on the whole weight and
the whole gradient, as a single process would. All ranks own about the same number of elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from roll.strategy.fsdp2.export import local, whole

Outline = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Shape and dtype of each tensor of a parameter's state; empty before its first step."""
MakeOptimizer = Callable[[nn.Parameter], Optimizer]
"""Makes the optimizer of one parameter, which has the right number of axes but no elements yet."""


@dataclass(frozen=True, slots=True)
class Form:
    """The way from a parameter's state to plain tensors, which a checkpoint can hold, and back."""

    plain: Callable[[Mapping[str, Any]], Mapping[str, Tensor]] = dict
    """Returns tensors that share memory with the state."""
    rebuilt: Callable[[Mapping[str, Tensor]], dict[str, Any]] = dict
    """Returns a state that shares memory with the tensors."""


AS_IT_IS = Form()


class WholeSteps:
    """Steps on sharded parameters, each on the whole of one parameter.

    Args:
        params: parameters, in the same order on all ranks.
        make: maker of each parameter's optimizer.
        peak: peak of the learning rate.
        form: form of the states in checkpoints.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        make: MakeOptimizer,
        peak: float,
        form: Form = AS_IT_IS,
    ) -> None:
        self.params = list(params)
        self.peak = peak
        self._form = form
        self._owners = owners([p.numel() for p in self.params], dist.get_world_size())
        self._own: dict[nn.Parameter, tuple[nn.Parameter, Optimizer]] = {}
        for p, owner in zip(self.params, self._owners, strict=True):
            if owner == dist.get_rank():
                stands_for = nn.Parameter(_nothing(p))
                self._own[p] = (stands_for, make(stands_for))

    @property
    def state(self) -> Mapping[nn.Parameter, dict[str, Any]]:
        """State of the parameters that this rank owns, by their names in the optimizer."""
        return {p: optimizer.state[slot] for p, (slot, optimizer) in self._own.items()}

    @property
    def saved(self) -> Mapping[nn.Parameter, Mapping[str, Tensor]]:
        """State as a checkpoint has it."""
        return {p: self._form.plain(state) for p, state in self.state.items()}

    def restore(self, p: nn.Parameter, outline: Outline) -> None:
        """Replace the state of a parameter by zeros, which the caller then fills."""
        if p in self._own:
            slot, optimizer = self._own[p]
            optimizer.state[slot] = self._form.rebuilt(
                {
                    name: torch.zeros(shape, dtype=dtype, device=p.device)
                    for name, (shape, dtype) in outline.items()
                }
            )

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Take a step with the gradients of the parameters, and drop these gradients. Collective.

        One whole weight and one whole gradient exist at a time.
        """
        for p, owner in zip(self.params, self._owners, strict=True):
            if p.grad is None:
                continue
            weight, gradient = whole(p.detach()).contiguous(), whole(p.grad)
            if owner == dist.get_rank():
                self._step_on(p, weight, gradient, lr)
            p.grad = None
            dist.broadcast(weight, src=owner)
            if isinstance(p, DTensor):
                weight = distribute_tensor(weight, p.device_mesh, p.placements, src_data_rank=None)
            local(p).copy_(local(weight))

    def _step_on(self, p: nn.Parameter, weight: Tensor, gradient: Tensor, lr: float) -> None:
        """Change the whole weight of a parameter that this rank owns, in place."""
        slot, optimizer = self._own[p]
        slot.data, slot.grad = weight, gradient
        (group,) = optimizer.param_groups
        if isinstance(group["lr"], Tensor):  # so torchao wants it
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
        optimizer.step()
        slot.data, slot.grad = _nothing(p), None


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the owner of each parameter: the largest ones first, each to the rank that owns the
    fewest elements so far.

    Args:
        sizes: number of elements of each parameter.
    """
    owned = [0] * ranks
    found = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        rank = min(range(ranks), key=owned.__getitem__)
        owned[rank] += sizes[number]
        found[number] = rank
    return found


def _nothing(p: Tensor) -> Tensor:
    """Return a tensor without elements, with the axes, dtype and device of `p`."""
    return torch.empty((0,) * p.dim(), dtype=p.dtype, device=p.device)
