"""Settings that every optimizer has: learning rate, its schedule, clipping."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from roll.config.base import Config


class OptimizerBase(Config):
    """Settings of every optimizer: learning rate, its schedule, clipping. Steps are optimizer
    steps."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Largest global norm of the gradients; larger gradients are scaled down to it."""
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "constant"
    """Learning rate after the warm-up. `constant`: the peak. `linear`, `cosine`: decayed to
    `min_lr_ratio` of the peak at the last step. `inverse_sqrt`: falls as one over the root of the
    number of steps, warm-up included (arXiv 1706.03762). `wsd`: the peak, and in the last
    `decay_ratio` of the steps a linear decay (warm-up, stable, decay; arXiv 2404.06395)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps in which the learning rate rises linearly from zero."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Share of the run's steps that are warm-up, rounded up, but not all of them; in place of
    `warmup_steps`."""
    decay_ratio: float = Field(default=0.1, gt=0, lt=1)
    """Share of the run's steps in which `wsd` decays, rounded up."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the peak learning rate that is left at the last step; `inverse_sqrt` stays there if
    it reaches it earlier."""

    def warmup(self, total_steps: int | None) -> int:
        """Return the number of steps of the warm-up in a run of `total_steps`; as a share, all but
        the last at most.

        Raises:
            ValueError: the warm-up is a share of the run's steps, and `total_steps` is None.
        """
        if not self.warmup_ratio:
            return self.warmup_steps
        if total_steps is None:
            raise ValueError("warmup_ratio needs the total number of optimizer steps")
        return min(_rounded_up(self.warmup_ratio * total_steps), total_steps - 1)

    def decay(self, total_steps: int) -> int:
        """Return the number of steps in which `wsd` decays in a run of `total_steps`: all but the
        first at most."""
        return min(_rounded_up(self.decay_ratio * total_steps), total_steps - 1)


def _rounded_up(steps: float) -> int:
    """Return the next whole number of steps. 0.07 of 100 is 7, though its product in binary is
    slightly more."""
    return math.ceil(round(steps, 6))
