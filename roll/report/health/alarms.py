"""Alarms: what is wrong with a run, in words, and what to try. Pure functions of its records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roll.report.health.course import Course
from roll.report.records import Record


@dataclass(frozen=True, slots=True)
class Found:
    """Fault that the condition of a rule has found."""

    text: str
    """What is wrong, with its numbers."""
    metric: str
    """Metric that shows it."""
    since: int | None = None
    """First step that shows it; None if it is not bound to a step."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that raises an alarm."""

    name: str
    finds: Callable[[Course], Found | None]
    """Condition: returns what is wrong, or None."""
    advice: str
    """What to try."""
    explains: tuple[str, ...] = ()
    """Names of the rules whose alarms follow from this one, and are not raised beside it."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm: what is wrong, and what to try."""

    rule: str
    text: str
    advice: str
    metric: str
    since: int | None


def alarms(records: Sequence[Record], rules: Sequence[Rule]) -> list[Alarm]:
    """Return the alarms of a run, in the order of the rules, without those that another explains.

    Args:
        records: records of all steps, in order.
        rules: rules to apply, causes before what follows from them.
    """
    course = Course(records)
    raised: list[Alarm] = []
    explained: set[str] = set()
    for rule in rules:
        found = None if rule.name in explained else rule.finds(course)
        if found is not None:
            raised.append(Alarm(rule.name, found.text, rule.advice, found.metric, found.since))
            explained.update(rule.explains)
    return raised
