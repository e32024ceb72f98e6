"""Run file of `pipeline: agentic`, reinforcement learning of agents in environments."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from roll.config.agentic_base import AgenticBase
from roll.config.checks.agentic import check_agentic


class AgenticConfig(AgenticBase):
    """Reinforcement learning of an agent that takes turns with environments."""

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        """Check the rules between keys; raise one ValueError that names all problems."""
        check_agentic(self)
        return self
