"""Keys that pipelines on rows at hand share, which the checks read."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Self

from pydantic import Field, ValidationError

from roll.config.errors import ConfigError
from roll.config.run import RoleConfig, RunConfig
from roll.config.sections.data import FileConfig, PreferenceDataConfig, RowsConfig
from roll.config.sections.lifecycle import PreferenceValidation, TaughtValidation, TextValidation
from roll.config.sections.roles import Role
from roll.config.sections.training import LearnerRole

NO_LIMIT = 2**62
"""Number of steps that no run reaches."""


class OfflineConfig(RunConfig):
    """One step is one optimizer step, on `data.rows_per_step` rows."""

    max_steps: int = Field(default=NO_LIMIT, ge=1)
    """Ends the run; or `epochs`, or whichever comes first."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the data: as many rows as there are in all. Several sources are drawn by their
    weights, whatever their sizes."""
    actor_train: LearnerRole
    data: RowsConfig
    validation: TextValidation | TaughtValidation | PreferenceValidation

    @property
    def roles(self) -> dict[str, RoleConfig]:
        """Every role that holds devices."""
        return {Role.ACTOR_TRAIN: self.actor_train}

    def total_updates(self, role: Role = Role.ACTOR_TRAIN) -> int:
        """Optimizer steps of the whole run."""
        return self.max_steps

    def with_steps(self, num_rows: int) -> Self:
        """`max_steps` as it is once the number of rows is known.

        Raises:
            ConfigError: something else in the file does not fit so many steps.
        """
        if self.epochs is None:
            return self
        # The text of a float is what the user wrote: 1.1 means eleven tenths.
        steps = math.ceil(Fraction(repr(self.epochs)) * num_rows / self.data.rows_per_step)
        known = self.model_copy(update={"max_steps": min(self.max_steps, max(steps, 1))})
        try:
            return type(self).model_validate_json(known.model_dump_json())
        except ValidationError as error:
            wrong = "\n".join(str(item["ctx"]["error"]) for item in error.errors())
            raise ConfigError(wrong) from None


class PreferenceConfig(OfflineConfig):
    """Learning from preferences."""

    data: PreferenceDataConfig
    validation: PreferenceValidation = PreferenceValidation()

    @property
    def sources(self) -> tuple[FileConfig, ...]:
        return (*self.data.sources, *self.validation.sets.values())
