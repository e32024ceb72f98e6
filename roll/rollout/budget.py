"""How many prompts may be in flight, and when a step that does not fill up must give up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from roll.core.errors import RollError


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one step, all counted in groups (one prompt and its samples)."""

    num_groups: int
    """Accepted groups that the step needs."""
    extra_prompts: int = 0
    """In flight beyond what the step still needs."""
    max_in_flight: int = 256
    max_prompts_factor: float = 4.0

    @property
    def max_prompts(self) -> int:
        """Prompts that one step may try; the extra ones come on top of the factor."""
        return math.ceil(self.max_prompts_factor * self.num_groups) + self.extra_prompts

    def may_start(self, *, accepted: int, running: int, started: int) -> int:
        """How many more prompts may start now; `started` counts this step's, running or not."""
        wanted = self.num_groups + self.extra_prompts - accepted - running
        return max(0, min(wanted, self.max_in_flight - running, self.max_prompts - started))

    def gave_up(
        self, *, step: int, accepted: int, started: int, rejected: Mapping[str, int]
    ) -> RollError:
        """The error for a step that used up its prompts; `rejected` counts groups by reason."""
        ranked = sorted(rejected.items(), key=lambda item: (-item[1], item[0]))
        reasons = ", ".join(f"{count} x {reason}" for reason, count in ranked[:5])
        end = "the limit" if started >= self.max_prompts else "all that the data has"
        return RollError(
            f"step {step} needs {self.num_groups} groups of samples, tried {started} prompts "
            f"({end}) and accepted {accepted}; rejected: {reasons or 'none'}. Raise "
            f"rollout.max_prompts_factor (now {self.max_prompts_factor:g}) or "
            "data.samples_per_prompt, use prompts that the model solves sometimes but not "
            "always, or take a filter out of rollout.filters"
        )
