"""End of a run whose validation no longer improves (`validation.stop`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from roll.config.sections.lifecycle import StopConfig


class Patience:
    """The best value of a validation metric so far, and how many validations came since."""

    def __init__(self, config: StopConfig | None, saved: Mapping[str, Any]) -> None:
        """Go on from a checkpoint.

        Args:
            config: `validation.stop`; None: the run ends at its last step only.
            saved: `state` at the checkpoint. Empty, or of another metric: nothing has been seen.
        """
        known = saved if config is not None and saved.get("metric") == config.metric else {}
        self._config = config
        self._best: float | None = known.get("best")
        self._best_step: int = known.get("best_step", 0)
        self._waited: int = known.get("waited", 0)

    def see(self, step: int, scores: Mapping[str, float]) -> None:
        """Count a validation. Without a value of the metric nothing changes; a value that is no
        finite number is no improvement.

        Args:
            step: number of steps done.
            scores: metrics of the validation; empty if there was none.
        """
        config = self._config
        if config is None or config.metric not in scores:
            return
        value, sign = scores[config.metric], 1 if config.prefers_high else -1
        if math.isfinite(value) and (
            self._best is None or sign * (value - self._best) > config.min_change
        ):
            self._best, self._best_step, self._waited = value, step, 0
        else:
            self._waited += 1

    @property
    def end(self) -> str | None:
        """Why the run ends, in one line; None if it goes on."""
        config = self._config
        if config is None or self._waited < config.patience:
            return None
        best = (
            "no finite value"
            if self._best is None
            else f"best {self._best:.6g} after {self._best_step} steps"
        )
        times = "1 validation" if self._waited == 1 else f"{self._waited} validations"
        return f"{config.metric} has not improved in {times} ({best}; validation.stop)"

    @property
    def state(self) -> dict[str, Any]:
        """Content of a checkpoint that the next session goes on from; empty without settings."""
        if self._config is None:
            return {}
        return {
            "metric": self._config.metric,
            "best": self._best,
            "best_step": self._best_step,
            "waited": self._waited,
        }
