"""Schedules of the learning rate."""

from __future__ import annotations

import math
from typing import assert_never

from roll.config.sections.optimizers.base import OptimizerBase


def lr_at(
    step: int, config: OptimizerBase, total_steps: int | None, peak: float | None = None
) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    In the warm-up the rate grows linearly, from above zero, and reaches the peak at the first step
    after it. A decay that has an end reaches `min_lr_ratio` of the peak at the last step,
    `total_steps - 1`, and the rate stays there.

    Args:
        peak: peak of the rate; None: `config.lr`.

    Raises:
        ValueError: `total_steps` is None, and the schedule has an end or the warm-up is a share of
            it.
    """
    warmup, schedule = config.warmup(total_steps), config.schedule
    peak = config.lr if peak is None else peak
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if schedule == "constant":
        return peak
    if schedule == "inverse_sqrt":
        return peak * max(math.sqrt((warmup + 1) / (step + 1)), config.min_lr_ratio)
    if total_steps is None:
        raise ValueError(f"schedule {schedule!r} needs the total number of optimizer steps")
    last = total_steps - 1
    match schedule:
        case "linear":
            left = 1.0 - _done(step, warmup, last)
        case "cosine":
            left = (1.0 + math.cos(math.pi * _done(step, warmup, last))) / 2
        case "wsd":
            left = 1.0 - _done(step, max(last - config.decay(total_steps), warmup), last)
        case _:
            assert_never(schedule)
    return peak * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)


def _done(step: int, begin: int, last: int) -> float:
    """Return how much of a decay is over: 0 up to step `begin`, 1 from step `last` on."""
    return min(max(step - begin, 0) / max(last - begin, 1), 1.0)


class Schedule:
    """The learning rate schedule of one run.

    Skipped updates count too, so that the schedule ends with the run.
    """

    def __init__(self, config: OptimizerBase, total_steps: int | None) -> None:
        """Check that the schedule has all it needs.

        Raises:
            ValueError: `total_steps` is None, and the schedule or its warm-up needs it.
        """
        self._config = config
        self._total_steps = total_steps
        self.updates = 0
        """Number of updates so far, skipped ones included."""
        lr_at(config.warmup(total_steps), config, total_steps)  # raises if `total_steps` is missing

    def advance(self) -> float:
        """Count one update and return its learning rate."""
        self.updates += 1
        return self.with_peak(self._config.lr)

    def with_peak(self, peak: float) -> float:
        """Return the learning rate of the update that was counted last, of parameters whose rate
        has another peak but the same schedule."""
        return lr_at(self.updates - 1, self._config, self._total_steps, peak)
