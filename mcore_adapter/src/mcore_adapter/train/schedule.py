"""Learning rate of each step."""

from __future__ import annotations

import math

from mcore_adapter.train.settings import Optimizer


def lr_at(step: int, settings: Optimizer, num_steps: int) -> float:
    """Return the learning rate of a step.

    During warm-up the learning rate grows linearly, from a value above zero in the first step to
    `settings.lr` at step `warmup_steps`. A decaying schedule reaches `min_lr` at the last step.

    Args:
        step: number of the step, counted from 0.
        num_steps: number of steps of the whole run.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / (settings.warmup_steps + 1)
    if settings.schedule == "constant":
        return settings.lr
    done = (step - settings.warmup_steps) / max(num_steps - 1 - settings.warmup_steps, 1)
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.min_lr + (settings.lr - settings.min_lr) * left
