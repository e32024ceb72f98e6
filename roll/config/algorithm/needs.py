"""Requirements of a choice on the rest of the config; `roll.config.checks` verifies them."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from roll.config.base import Config


class Need(StrEnum):
    """Something that another part of the config must provide."""

    SIBLINGS = "siblings"
    """Two or more samples per prompt."""
    CRITIC = "critic"
    """A `critic` role."""
    PROCESS_REWARD = "process_reward"
    """A `process_reward` role."""
    REFERENCE = "reference"
    """A `reference` role."""
    OLD_LOGPROBS = "old_logprobs"
    """Log-probs of the policy for the whole update, computed before the update begins."""
    SQUARED_PROBS = "squared_probs"
    """Sums of the policy's squared probabilities at each token, from the forward pass that computes
    its log-probs before the update begins."""
    GREEDY_BASELINE = "greedy_baseline"
    """A greedy response to every prompt, and its reward."""
    TURNS = "turns"
    """Samples that are episodes, with turns: `pipeline: agentic`."""
    TEACHER = "teacher"
    """One or more entries in `teachers`."""
    RATIO = "ratio"
    """Several updates per step, or the engine's log-probs as the old ones. With one update per step
    and the trainer's own log-probs the ratio is always 1, and the choice has no effect."""


class Choice(Config):
    """Base of every entry of `algorithm:`."""

    needs: ClassVar[frozenset[Need]] = frozenset()
    """Requirements on the rest of the config; a run file that lacks one is refused."""

    @property
    def all_needs(self) -> frozenset[Need]:
        """`needs` of the class, plus the requirements of this object's settings."""
        return self.needs
