"""The part of a DeepSpeed update after the backward pass: AdamW, its guard, the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from roll.config.sections.optimizers.kinds import AdamWConfig
from roll.strategy.training import adamw
from roll.strategy.training.schedule import Schedule

MOMENTS = ("exp_avg", "exp_avg_sq")


class GuardedAdamW(torch.optim.AdamW):
    """AdamW that takes a step only if `may_step` returns True.

    DeepSpeed computes the gradient norm and takes the steps, group by group, in a single call. The
    optimizer's `step` is the only place in between at which an update can be refused.
    """

    may_step: Callable[[], bool]
    """Returns whether the current gradients may be applied."""

    def step(self, closure: Any = None) -> Any:
        if self.may_step():
            super().step(closure)


def guarded_adamw(model: nn.Module, config: AdamWConfig) -> GuardedAdamW:
    """Make the optimizer of the trainable parameters; `Update` sets its `may_step`."""
    params = [p for p in model.parameters() if p.requires_grad]
    return GuardedAdamW(adamw.groups(params), lr=config.lr, **adamw.options(config))


class Update:
    """Gradient clipping, AdamW and the learning rate schedule, around DeepSpeed's step.

    Args:
        engine: DeepSpeed's engine, built with `optimizer`.
        optimizer: AdamW in the engine.
        shared: True if a ZeRO optimizer of DeepSpeed wraps `optimizer`; that optimizer computes
            the gradient norm. False without ZeRO: `optimizer` updates full parameters.
    """

    def __init__(
        self,
        engine: Any,
        optimizer: GuardedAdamW,
        config: AdamWConfig,
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
        """Create moments of zero for the tensors that AdamW updates.

        AdamW itself would create them at its first step, which is too late to fill them from a
        checkpoint.

        Args:
            flats: these tensors, from `shard_map.flats`.
        """
        for flat in flats:
            self.optimizer.state[flat] = {
                "step": torch.zeros((), dtype=torch.float32, device=flat.device),
                **{name: torch.zeros_like(flat) for name in MOMENTS},
            }

    @property
    def steps(self) -> int:
        """Number of steps that AdamW has taken, without skipped updates."""
        return int(next(iter(self.optimizer.state.values()))["step"])

    @steps.setter
    def steps(self, steps: int) -> None:
        for state in self.optimizer.state.values():
            state["step"].fill_(steps)

    def apply(self) -> tuple[float, float, bool]:
        """Clip the gradients, take a step and clear the gradients. Collective.

        The update is skipped, and weights and optimizer state stay unchanged, if the gradient norm
        is zero or not finite; `roll.strategy.fsdp2.update.Update.apply` says why. The schedule
        advances in any case.

        Returns:
            Gradient norm before clipping, learning rate, and False if the update was skipped.
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
