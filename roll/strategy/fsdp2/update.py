"""The part of an FSDP2 update after the backward pass."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from roll.config.sections.optimizers.kinds import OptimizerConfig
from roll.strategy.fsdp2.export import local
from roll.strategy.fsdp2.optimizers import Steps, by_mesh, optimizers_of
from roll.strategy.tensor_names import trained
from roll.strategy.training.schedule import Schedule


class Update:
    """Gradient clipping, optimizers and the learning rate schedule of one model.

    Args:
        device: device on which the gradient norm is computed.
        total_steps: number of optimizer steps of the whole run; required if the learning rate
            decays, else ValueError.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        config: OptimizerConfig,
        total_steps: int | None,
    ) -> None:
        self._device = device
        self._max_grad_norm = config.max_grad_norm
        self._params = [p for _, p in trained(model)]
        self._by_mesh = by_mesh(self._params)
        self.kind = config.kind
        """Kind of the optimizer, as in a run file."""
        self.schedule = Schedule(config, total_steps)
        self.optimizers: list[Steps] = optimizers_of(model, config)
        """Optimizers, each of a part of the trained parameters."""

    def apply(self) -> tuple[float, float, bool]:
        """Clip the gradients, take a step and clear the gradients. Collective.

        The update is skipped, and weights and optimizer state stay unchanged, if the gradient norm
        is not finite or is zero. The norm is zero if every sample is masked or every advantage is
        0; an optimizer with momentum would then continue in its previous direction. The schedule
        advances in any case, so that it ends with the run.

        Returns:
            Gradient norm before clipping, learning rate (with Muon that of the matrices), and False
            if the update was skipped.
        """
        lr = self.schedule.advance()
        norm = self._norm()
        grad_norm = float(norm)
        applied = 0 < grad_norm < math.inf
        if applied:
            if grad_norm > self._max_grad_norm:
                for params in self._by_mesh:
                    clip_grads_with_norm_(params, self._max_grad_norm, norm)
            for optimizer in self.optimizers:
                optimizer.step(self.schedule.with_peak(optimizer.peak))
        for p in self._params:
            p.grad = None
        return grad_norm, lr, applied

    def _norm(self) -> Tensor:
        """Compute the norm of all gradients together, float32 on the device. Collective."""
        parts: dict[int, list[Tensor]] = {}
        for p in self._params:
            if p.grad is not None:
                parts.setdefault(_copies(p.grad), []).append(local(p.grad))
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for copies, grads in parts.items():
            total += get_total_norm(grads).to(total) ** 2 / copies
        dist.all_reduce(total)
        return total.sqrt().float()


def _copies(grad: Tensor) -> int:
    """Return the number of ranks that hold the same part of a gradient."""
    copies = 1
    if not isinstance(grad, DTensor):
        return copies  # there is one rank
    for axis, placement in enumerate(grad.placements):
        copies *= grad.device_mesh.size(axis) if placement.is_replicate() else 1
    return copies
