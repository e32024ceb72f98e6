"""Run file of `pipeline: rlvr`, reinforcement learning from verifiable rewards."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from roll.config.checks.rlvr import check_rlvr
from roll.config.rlvr_base import RlvrBase


class RlvrConfig(RlvrBase):
    """Reinforcement learning from verifiable rewards."""

    pipeline: str = "rlvr"

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        """Check the rules between keys; raise one ValueError that names all problems."""
        check_rlvr(self)
        return self
