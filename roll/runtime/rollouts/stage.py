"""`Rollouts`: where the groups come from on which the steps of a run train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from roll.core.metrics import Metrics
from roll.core.timing import Timers
from roll.core.types import Prompt
from roll.rollout.types import Group


class Rollouts(Protocol):
    """Source of the groups of one step after another.

    `Generation` asks engines and rewards for them, `Replay` reads files that a run has kept. All
    that follows in a step is the same.
    """

    def collect(self, step: int, timers: Timers) -> tuple[list[Group], Metrics]:
        """Return the groups of a step, scored, and metrics on how they were got.

        Args:
            step: number of the step.
            timers: get the times spent.
        """
        ...

    def take_rates(self) -> Metrics:
        """Return rates of failures and times of the rewards, and what pushes of weights had to
        make, since the last call."""
        ...

    def trainer_busy(self) -> AbstractContextManager[None]:
        """Let nothing else use weights or devices of the trainers inside the block."""
        ...

    def update_weights(self, version: int, *, verify: bool) -> None:
        """Give the trained weights to all that generates. Call this method inside `trainer_busy`.

        Args:
            version: version of these weights.
            verify: check the received weights by their checksum.
        """
        ...

    def validate(self, step: int, asked_to_end: Callable[[], bool]) -> dict[str, float]:
        """Return the scores of the held-out prompts after `step` steps.

        Raises:
            ValidationCutError: `asked_to_end` has returned True meanwhile.
        """
        ...

    @property
    def find_prompt(self) -> Callable[[str], Prompt]:
        """Function that returns the prompt of the training data with this id."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on, as JSON objects and arrays."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned in an earlier session."""
        ...

    def close(self) -> None:
        """Stop all that runs in the process of the driver."""
        ...
