"""The learning rate of each optimizer step."""

from __future__ import annotations

import math

from roll.config.sections.training import OptimizerConfig


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


class Schedule:
    """Counts the updates of a run, so that the rate goes on with skipped ones too and ends with
    the run."""

    def __init__(self, config: OptimizerConfig, total_steps: int | None) -> None:
        """
        Raises:
            ValueError: as `lr_at`.
        """
        self._config = config
        self._total_steps = total_steps
        self.updates = 0
        """Optimizer steps so far, skipped ones included."""
        lr_at(config.warmup_steps, config, total_steps)  # a schedule without its end fails here

    def advance(self) -> float:
        """The rate of the next update, which from now on is done."""
        self.updates += 1
        return lr_at(self.updates - 1, self._config, self._total_steps)
