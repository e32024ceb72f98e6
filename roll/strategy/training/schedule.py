"""Schedules of the learning rate."""

from __future__ import annotations

import math

from roll.config.sections.training import OptimizerConfig


def lr_at(step: int, config: OptimizerConfig, total_steps: int | None) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    In the warm-up the rate grows linearly, from above zero, and reaches the peak at step
    `warmup_steps`. A decay reaches `min_lr_ratio * lr` at the last step, `total_steps - 1`, and the
    rate stays there.

    Raises:
        ValueError: the warm-up is over, the schedule decays and `total_steps` is None.
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


class Schedule:
    """The learning rate schedule of one run.

    Skipped updates count too, so that the schedule ends with the run.
    """

    def __init__(self, config: OptimizerConfig, total_steps: int | None) -> None:
        """Check that the schedule has all it needs.

        Raises:
            ValueError: the schedule decays and `total_steps` is None.
        """
        self._config = config
        self._total_steps = total_steps
        self.updates = 0
        """Number of updates so far, skipped ones included."""
        lr_at(config.warmup_steps, config, total_steps)  # raises if `total_steps` is missing

    def advance(self) -> float:
        """Count one update and return its learning rate."""
        self.updates += 1
        return lr_at(self.updates - 1, self._config, self._total_steps)
