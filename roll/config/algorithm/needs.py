"""What a choice asks of the rest of the run; checked once, in `roll.config.checks.common`."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from roll.config.base import Config


class Need(StrEnum):
    """Something that another part of the config must provide."""

    SIBLINGS = "siblings"
    """At least two samples per prompt."""
    CRITIC = "critic"
    """A `critic` role."""
    REFERENCE = "reference"
    """A `reference` role."""
    OLD_LOGPROBS = "old_logprobs"
    """The policy's log-probs of the whole update before it begins."""
    GREEDY_BASELINE = "greedy_baseline"
    """A greedy response to every prompt, and its reward."""
    TEACHER = "teacher"
    """At least one of `teachers`."""
    RATIO = "ratio"
    """Several updates per step, or the engine's log-probs as the old ones; with one update of the
    trainer's own the ratio is always 1 and the choice has no effect."""


class Choice(Config):
    """The base of every entry of `algorithm:`."""

    needs: ClassVar[frozenset[Need]] = frozenset()

    @property
    def all_needs(self) -> frozenset[Need]:
        """`needs`, and what these settings of the choice ask on top."""
        return self.needs
