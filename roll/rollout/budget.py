"""How many groups may be in flight, given how old they may get; and when a step must give up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from roll.core.errors import RollError


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits, all counted in groups (one prompt and its samples).

    Step s trains version s of the weights into version s + 1. A group that is begun with version v
    and trained on at step s has the staleness s - v.
    """

    groups_per_step: int
    """Accepted groups that each step needs."""
    max_staleness: int = 0
    extra: int = 0
    """In flight beyond what is needed."""
    max_in_flight: int = 256
    max_prompts_factor: float = 4.0

    def may_begin(self, *, outstanding: int, running: int, ahead: int) -> int:
        """How many more groups may begin now.

        The group at place p among the outstanding ones is trained on p // groups_per_step steps
        after the next one, so as many may be outstanding as will all be used in time.

        Args:
            outstanding: begun and neither trained on nor rejected.
            running: those of them that have not ended.
            ahead: the next step to be collected, minus the version of the weights.
        """
        steps = self.max_staleness + 1 - ahead
        if steps <= 0:
            return 0
        wanted = steps * self.groups_per_step + self.extra - outstanding
        return max(0, min(wanted, self.max_in_flight - running))

    @property
    def max_rejected(self) -> int:
        """Groups that may be rejected between two steps before the run gives up."""
        return (self.max_staleness + 1) * (self._max_tried - self.groups_per_step)

    @property
    def _max_tried(self) -> int:
        """Groups of a step, those that it needs among them."""
        return math.ceil(self.max_prompts_factor * self.groups_per_step)

    def _limit(self) -> str:
        """How the limit comes about, for people."""
        steps = self.max_staleness + 1
        times = f", for each of {steps} steps under way" if steps > 1 else ""
        return (
            f"The limit is {self.max_rejected} rejected groups: {self._max_tried} tried, which is "
            f"{self.max_prompts_factor:g} times {self.groups_per_step}, less the "
            f"{self.groups_per_step} that are needed{times}"
        )

    def gave_up(self, *, step: int, ready: int, rejected: Mapping[str, int]) -> RollError:
        """The error for a step that cannot be filled; `rejected` counts groups by reason."""
        count = sum(rejected.values())
        ranked = sorted(rejected.items(), key=lambda item: (-item[1], item[0]))
        reasons = ", ".join(f"{times} x {reason}" for reason, times in ranked[:5])
        over = count > self.max_rejected
        end = "the limit" if over else "all that the data has"
        return RollError(
            f"step {step} needs {self.groups_per_step} groups of samples; it accepted {ready} and "
            f"rejected {count} ({end}): {reasons or 'none'}. Raise rollout.max_prompts_factor (now "
            f"{self.max_prompts_factor:g}) or data.samples_per_prompt, use prompts that the model "
            "solves sometimes but not always, or take a filter out of rollout.filters"
            + (f". {self._limit()}" if over else "")
        )
