"""Signs that a run learns nothing, as they begin, and what became of it in one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Sign:
    """Something in a step's record that a person should not overlook."""

    shows: Callable[[Record], bool]
    begins: str
    """What is said when a step shows it and the one before did not."""
    was: str
    """The same for the end of a run, after `in 3 of 5 steps `."""


def _equal(record: Record) -> bool:
    # Where a critic or a teacher gives advantages, equal rewards teach something all the same.
    return (
        "loss/policy" in record
        and record.get("groups/equal_rewards_fraction", 0.0) >= 1
        and record.get("advantage/abs_mean", 0.0) == 0
    )


def _not_finite(record: Record) -> bool:
    return not all(math.isfinite(record.get(name, 0.0)) for name in ("loss/total", "grad_norm"))


SIGNS = (
    Sign(
        _equal,
        "all samples of every group have equal rewards, so nothing is learned; read rollouts/, and "
        "look at the reward, the difficulty of the prompts and sampling.temperature",
        "all groups had equal rewards, which teach nothing",
    ),
    Sign(
        lambda record: record.get("truncated_fraction", 0.0) >= 1,
        "every response is cut off at sampling.max_new_tokens; raise it, or look in rollouts/ at "
        "what keeps the model from ending",
        "every response was cut off",
    ),
    Sign(
        lambda record: record.get("skipped_steps", 0.0) > 0,
        "the optimizer skips updates, whose gradient is 0 or not finite",
        "updates were skipped",
    ),
    Sign(
        _not_finite,
        "the loss or its gradient is not finite; lower the learning rate, or look at the data",
        "the loss or its gradient was not finite",
    ),
)


class Lookout:
    """Says a sign when it begins, and when it is over."""

    def __init__(self) -> None:
        self._shown: set[Sign] = set()

    def look(self, record: Record) -> list[str]:
        """What is new in the record of a training step; of others nothing."""
        if "time/step_s" not in record:
            return []
        said = []
        for sign in SIGNS:
            if sign.shows(record) and sign not in self._shown:
                self._shown.add(sign)
                said.append(sign.begins)
            elif sign in self._shown and not sign.shows(record):
                self._shown.remove(sign)
                said.append(f"no longer: {sign.begins.split(';')[0].split(',')[0]}")
        return said


def verdict(
    records: Sequence[Mapping[str, Any]], validated: Mapping[str, Mapping[str, Any]]
) -> str:
    """A run in one sentence: what it was measured by, and what went wrong.

    Args:
        validated: `validation` of a summary.
    """
    steps = [record for record in records if "time/step_s" in record]
    counts = [(sum(map(sign.shows, steps)), sign) for sign in SIGNS]
    troubles = [
        f"in {count} of {len(steps)} steps {sign.was}"
        for count, sign in sorted(counts, key=lambda each: -each[0])
        if count
    ]
    course = _course(steps, validated)
    if troubles and 2 * max(count for count, _ in counts) >= len(steps):
        return f"This run went wrong: {'; '.join(troubles)} ({course})."
    return f"{course}{''.join(f'; {each}' for each in troubles)}."


def _course(steps: Sequence[Mapping[str, Any]], validated: Mapping[str, Mapping[str, Any]]) -> str:
    for ending in ("mean@1", "/accuracy", "/divergence", "/loss"):
        for name, value in validated.items():
            if name.endswith(ending):
                return f"{name} went from {value['first']:.3f} to {value['last']:.3f}"
    for name in ("reward/mean", "loss/total"):
        values = [step[name] for step in steps if name in step]
        if values:
            return f"{name} went from {values[0]:.3f} to {values[-1]:.3f}, without a validation"
    return "no step was done"
