"""Everything after the backward pass: the step of AdamW or its refusal, and the rates of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from roll.config.sections.training import OptimizerConfig
from roll.strategy.training import adamw
from roll.strategy.training.schedule import Schedule

MOMENTS = ("exp_avg", "exp_avg_sq")


class GuardedAdamW(torch.optim.AdamW):
    """AdamW that steps only while `may_step` says so.

    DeepSpeed computes the gradient's norm and steps in one call, group by group; in between it
    leaves no other place to refuse an update.
    """

    may_step: Callable[[], bool]

    def step(self, closure: Any = None) -> Any:
        if self.may_step():
            super().step(closure)


def guarded_adamw(model: nn.Module, config: OptimizerConfig) -> GuardedAdamW:
    params = [p for p in model.parameters() if p.requires_grad]
    return GuardedAdamW(adamw.groups(params), **adamw.options(config))


class Update:
    """Clipping, AdamW and the schedule, around DeepSpeed's step.

    Args:
        engine: DeepSpeed's, which has `optimizer` by now.
        shared: whether the optimizer is one of DeepSpeed's, which computes norms; without ZeRO
            it is AdamW on whole parameters.
    """

    def __init__(
        self,
        engine: Any,
        optimizer: GuardedAdamW,
        config: OptimizerConfig,
        total_steps: int | None,
        *,
        shared: bool,
    ) -> None:
        self._engine = engine
        self.shared = shared
        self._norm = 0.0
        self.optimizer = optimizer
        self.schedule = Schedule(config, total_steps)
        optimizer.may_step = self._may_step

    def start_moments(self, flats: list[Tensor]) -> None:
        """Moments of zero, which AdamW would make itself at its first step, after which it is too
        late to fill them from a checkpoint."""
        for flat in flats:
            self.optimizer.state[flat] = {
                "step": torch.zeros((), dtype=torch.float32, device=flat.device),
                **{name: torch.zeros_like(flat) for name in MOMENTS},
            }

    @property
    def steps(self) -> int:
        """That AdamW has done, skipped updates not among them."""
        return int(next(iter(self.optimizer.state.values()))["step"])

    @steps.setter
    def steps(self, steps: int) -> None:
        for state in self.optimizer.state.values():
            state["step"].fill_(steps)

    def apply(self) -> tuple[float, float, bool]:
        """Clip, step and clear the gradients; returns (grad norm, learning rate, applied).

        A gradient that is zero or not finite leaves weights and optimizer state as they are: see
        `Fsdp2Strategy`. The schedule moves on all the same.
        """
        lr = self.schedule.advance()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if not self.shared:
            grads = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
            self._norm = float(torch.nn.utils.get_total_norm(grads))
        self._engine.step()
        if self.shared:
            self._norm = float(self._engine.optimizer._global_grad_norm)
        return self._norm, lr, 0 < self._norm < math.inf

    def _may_step(self) -> bool:
        norm = float(self._engine.optimizer._global_grad_norm) if self.shared else self._norm
        return 0 < norm < math.inf
