"""What `roll check` found out by trying."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roll.config.errors import UserError

if TYPE_CHECKING:
    from roll.core.types import Prompt


@dataclass
class Trial:
    """What came out."""

    told: list[str] = field(default_factory=list)
    """What was measured, one fact a line."""
    remarks: list[str] = field(default_factory=list)
    """What somebody should know of it."""
    wrong: list[UserError] = field(default_factory=list)
    """What a run would stop at."""
    untried: list[str] = field(default_factory=list)
    """What could not be tried, each with the reason."""
    rows: dict[str, Prompt] = field(default_factory=dict)
    """The first prompt of each tag, for who tries rewards."""
