"""Everything after the backward pass: norm, clipping, AdamW and the schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll.config.training import OptimizerConfig
from roll.strategy.megatron.model import Weight
from roll.strategy.schedule import lr_at


class Update:
    """AdamW of PyTorch over float32 masters, with the numbers of the other backends.

    Megatron-Core's own optimizer asserts CUDA gradients when it clips, divides by another norm and
    steps where the gradient is zero.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        config: OptimizerConfig,
        total_steps: int | None,
        device: torch.device,
    ) -> None:
        self._config = config
        self._device = device
        self._total_steps = total_steps
        self.weights = weights
        self.updates = 0
        """Optimizer steps so far, skipped ones included."""
        # Decay pulls weights to zero; on norms and biases that only hurts.
        decayed = [w.master for w in weights if w.master.dim() >= 2]
        others = [w.master for w in weights if w.master.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": params, **more}
            for params, more in ((decayed, {}), (others, {"weight_decay": 0.0}))
            if params
        ]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        lr_at(config.warmup_steps, config, total_steps)  # a schedule without its end fails here

    def apply(self) -> tuple[float, float, bool]:
        """Clip and step; returns (grad norm, learning rate, applied). Collective.

        A gradient that is not finite leaves weights and optimizer state as they are, and so does
        one of zero: AdamW would go on in its old direction. The schedule moves on all the same.
        """
        lr = lr_at(self.updates, self._config, self._total_steps)
        self.updates += 1
        grad_norm = self._norm()
        applied = 0 < grad_norm < math.inf
        if applied:
            scale = self._config.max_grad_norm / (grad_norm + 1e-6)
            if scale < 1.0:
                torch._foreach_mul_([_gradient(w) for w in self.weights], scale)
            self._step(lr)
        return grad_norm, lr, applied

    def refresh(self) -> None:
        """Round the masters to what the model computes with."""
        for w in self.weights:
            if w.master is not w.parameter:
                w.parameter.data.copy_(w.master)

    def _norm(self) -> float:
        """Over all ranks, every weight once."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        # Not times a share of zero: a copy's gradient may be infinite.
        counted = [w for w in self.weights if w.share]
        if counted:
            norms = torch.stack(list(torch._foreach_norm([_gradient(w) for w in counted])))
            shares = torch.tensor([w.share for w in counted], dtype=torch.float64)
            total += (norms.double().square() * shares.to(self._device)).sum()
        dist.all_reduce(total)
        return float(total.sqrt())

    def _step(self, lr: float) -> None:
        for w in self.weights:
            w.master.grad = _gradient(w)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        for w in self.weights:
            w.master.grad = None
        self.refresh()


def _gradient(weight: Weight) -> Tensor:
    """Where Megatron-Core's data parallel wrapper keeps it, in float32."""
    gradient = getattr(weight.parameter, "main_grad")  # noqa: B009 - Megatron-Core sets it
    assert isinstance(gradient, Tensor)
    return gradient
