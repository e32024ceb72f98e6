"""Limits on the groups in flight, derived from the allowed staleness, and on rejected groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from roll.core.errors import RollError


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits on the groups of a run, all counted in groups (one prompt and its samples).

    Step s trains version s of the weights into version s + 1. A group that starts with version v
    and is trained on at step s has the staleness s - v.
    """

    groups_per_step: int
    """Number of accepted groups that each step needs."""
    max_staleness: int = 0
    """Largest staleness that a group may have when a step trains on it."""
    extra: int = 0
    """Number of groups that may be outstanding beyond those that the steps need."""
    max_in_flight: int = 256
    """Largest number of groups that run at the same time."""
    max_prompts_factor: float = 4.0
    """Groups that may be tried for one step, as a multiple of `groups_per_step`."""

    def may_begin(self, *, outstanding: int, running: int, ahead: int) -> int:
        """Return how many more groups may start now.

        The group at position p among the outstanding groups is trained on p // groups_per_step
        steps after the next step. The limit is the number of groups that are all trained on before
        they exceed `max_staleness`, plus `extra`.

        Args:
            outstanding: number of groups that have started and are neither trained on nor rejected.
            running: number of outstanding groups that have not ended.
            ahead: next step to be collected, minus the current version of the weights.
        """
        steps = self.max_staleness + 1 - ahead
        if steps <= 0:
            return 0
        wanted = steps * self.groups_per_step + self.extra - outstanding
        return max(0, min(wanted, self.max_in_flight - running))

    @property
    def max_rejected(self) -> int:
        """Number of groups that may be rejected between two steps; one more ends the run."""
        return (self.max_staleness + 1) * (self._max_tried - self.groups_per_step)

    @property
    def _max_tried(self) -> int:
        """Largest number of groups tried for one step, including the groups that the step needs."""
        return math.ceil(self.max_prompts_factor * self.groups_per_step)

    def _limit(self) -> str:
        """Return the sentence of an error message that explains how `max_rejected` is computed."""
        steps = self.max_staleness + 1
        times = f", for each of {steps} steps under way" if steps > 1 else ""
        return (
            f"The limit is {self.max_rejected} rejected groups: {self._max_tried} tried, which is "
            f"{self.max_prompts_factor:g} times {self.groups_per_step}, less the "
            f"{self.groups_per_step} that are needed{times}"
        )

    def gave_up(self, *, step: int, ready: int, rejected: Mapping[str, int]) -> RollError:
        """Return the error for a step that cannot get enough groups.

        Args:
            step: step that lacks groups.
            ready: number of groups that were accepted for the step.
            rejected: number of rejected groups for each reason.
        """
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
