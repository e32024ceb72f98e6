"""Learning rate as a pure function of the optimizer step."""

from __future__ import annotations

import math

from roll.config.training import OptimizerConfig


def lr_at(step: int, config: OptimizerConfig, total_steps: int | None) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    The warm-up grows linearly and reaches the peak at step `warmup_steps`; its first step is not
    zero. A decay reaches `min_lr_ratio * lr` at the last step, `total_steps - 1`, and stays there.

    Raises:
        ValueError: the schedule decays and `total_steps` is not given.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    if total_steps is None:
        raise ValueError(f"schedule {config.schedule!r} needs the total number of optimizer steps")
    span = max(total_steps - 1 - config.warmup_steps, 1)
    done = min((step - config.warmup_steps) / span, 1.0)
    left = 1.0 - done if config.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)
