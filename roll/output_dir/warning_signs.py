"""Warning signs that a run learns nothing, and a verdict on a run in one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Sign:
    """A warning sign in the record of a step."""

    shows: Callable[[Record], bool]
    begins: str
    """Message for the first step that shows the sign."""
    was: str
    """Description of the sign for the verdict, after `in 3 of 5 steps `."""


def _equal(record: Record) -> bool:
    """Return True if every group has equal rewards, and no critic or teacher gives advantages."""
    return (
        "loss/policy" in record
        and record.get("groups/equal_rewards_fraction", 0.0) >= 1
        and record.get("advantage/abs_mean", 0.0) == 0
    )


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
        lambda record: (
            not all(math.isfinite(record.get(name, 0.0)) for name in ("loss/total", "grad_norm"))
        ),
        "the loss or its gradient is not finite; lower the learning rate, or look at the data",
        "the loss or its gradient was not finite",
    ),
)


class Lookout:
    """Detector of warning signs: each sign is reported when it begins and when it ends."""

    def __init__(self) -> None:
        self._shown: set[Sign] = set()

    def look(self, record: Record) -> list[str]:
        """Return messages about signs that begin or end in this record; empty for records that are
        not of a training step."""
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
    """Return a sentence about a run: the course of its main metric, and the signs that it showed.

    Args:
        records: records of all steps.
        validated: the entry `validation` of a summary.
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


def _moved(name: str, value: Mapping[str, Any]) -> str:
    """Tell the first and last value of a metric."""
    return f"{name} went from {value['first']:.3f} to {value['last']:.3f}"


def _unpassed(score: Mapping[str, Any], passed: Mapping[str, Any] | None) -> str:
    """Return a remark if a mean score has risen and the share of samples that pass has not: then it
    rose by smaller rewards, such as one for a format."""
    if passed is None or not score["last"] > score["first"] or passed["last"] > passed["first"]:
        return ""
    if passed["last"] >= 1:
        return ""
    return (
        f", but pass@1 from {passed['first']:.3f} to {passed['last']:.3f}: not more samples reach "
        "the score that passes"
    )


def _course(steps: Sequence[Mapping[str, Any]], validated: Mapping[str, Mapping[str, Any]]) -> str:
    """Tell the first and last value of the main score: of the validations if there are any, else of
    the steps."""
    for ending in ("mean@1", "/accuracy", "/divergence", "/loss"):
        for name, value in validated.items():
            if name.endswith(ending):
                passed = validated.get(f"{name.removesuffix(ending)}pass@1")
                return f"{_moved(name, value)}{_unpassed(value, passed)}"
    for name in ("reward/mean", "loss/total"):
        values = [step[name] for step in steps if name in step]
        if values:
            return f"{name} went from {values[0]:.3f} to {values[-1]:.3f}, without a validation"
    return "no step was done"
