"""Base of the curricula that users bring; `roll.extend` exports it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from roll.config.sections.data import OwnCurriculumConfig
from roll.core.types import Prompt


@dataclass(frozen=True, slots=True)
class Seen:
    """Facts about a prompt when its turn comes."""

    pass_rate: float | None
    """Recent share of its samples that passed, 0 to 1; None before its first group has ended."""
    step: int
    """Number of steps that have got all of their groups."""
    epoch: int
    """Number of times that the rows of its source were all drawn."""


class Curriculum(OwnCurriculumConfig, ABC):
    """Choice of the prompts that are drawn. Rows have a new order in each epoch, and each is asked
    about when its turn comes.

    `column` names a column with pass rates that are known beforehand, `memory` is the share of the
    earlier rate in the recent one, and a sample passes from `pass_score` on. Pass rates and steps
    are kept in checkpoints, so a curriculum that only computes resumes exactly.
    """

    @abstractmethod
    def chance(self, prompt: Prompt, seen: Seen) -> float:
        """Return the chance, 0 to 1, that the prompt is drawn now. Of an epoch without any that is
        drawn, the last one is.

        Args:
            prompt: its columns are `prompt.extra`, its number of tokens `len(prompt.tokens)`.
            seen: what is known of it.
        """

    def source_factor(self, name: str, pass_rate: float | None) -> float:
        """Return the factor of the weight of a source, above zero; asked with `sources: true`.

        Args:
            name: name of the source.
            pass_rate: recent pass rate of all of its prompts; None before the first one.
        """
        return 1.0
