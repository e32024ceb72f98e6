"""Results of the trials of `roll check`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roll.config.errors import UserError

if TYPE_CHECKING:
    from roll.core.types import Prompt


@dataclass
class Trial:
    """Results of a trial."""

    told: list[str] = field(default_factory=list)
    """Measurements, one fact per line."""
    remarks: list[str] = field(default_factory=list)
    """Remarks that a user should read."""
    wrong: list[UserError] = field(default_factory=list)
    """Problems that would stop a run."""
    untried: list[str] = field(default_factory=list)
    """Names of parts that could not be tried, each with the reason."""
    rows: dict[str, Prompt] = field(default_factory=dict)
    """First prompt of each tag, for the trial of rewards."""
    counted: dict[str, int] = field(default_factory=dict)
    """Rows of each source that was read whole, by its key in the config."""
    mean_tokens: dict[str, float] = field(default_factory=dict)
    """Mean tokens of the first rows of each source, by its key: of prompts, or of whole texts."""
