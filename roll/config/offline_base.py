"""Keys that the run files of pipelines on existing rows have in common; the checks read them."""

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
"""Value of `max_steps` that stands for no limit."""


class OfflineConfig(RunConfig):
    """Base of the run files of pipelines that train on existing rows. A step is one optimizer step
    on `data.rows_per_step` rows."""

    max_steps: int = Field(default=NO_LIMIT, ge=1)
    """Step after which the run ends. If `epochs` is set as well, the run ends at the earlier of the
    two."""
    epochs: float | None = Field(default=None, gt=0)
    """Number of passes over the data; one pass is as many rows as all sources have together. If
    there are several sources, rows are drawn by the sources' weights, whatever their sizes are."""
    actor_train: LearnerRole
    data: RowsConfig
    validation: TextValidation | TaughtValidation | PreferenceValidation

    @property
    def roles(self) -> dict[str, RoleConfig]:
        return {Role.ACTOR_TRAIN: self.actor_train}

    def total_updates(self, role: Role = Role.ACTOR_TRAIN) -> int:
        """Return the number of optimizer steps of the whole run; `NO_LIMIT` until `with_steps`, if
        only `epochs` is set."""
        return self.max_steps

    def with_steps(self, num_rows: int) -> Self:
        """Return this config with `max_steps` lowered to the steps of `epochs`, if these are fewer.

        Without `epochs` the config is returned unchanged.

        Args:
            num_rows: number of rows of all sources together.

        Raises:
            ConfigError: another setting does not fit this number of steps.
        """
        if self.epochs is None:
            return self
        # Computed from the text of the float, because the text is what the user wrote: 1.1 is
        # exactly eleven tenths.
        steps = math.ceil(Fraction(repr(self.epochs)) * num_rows / self.data.rows_per_step)
        known = self.model_copy(update={"max_steps": min(self.max_steps, max(steps, 1))})
        try:
            return type(self).model_validate_json(known.model_dump_json())
        except ValidationError as error:
            wrong = "\n".join(str(item["ctx"]["error"]) for item in error.errors())
            raise ConfigError(wrong) from None


class PreferenceConfig(OfflineConfig):
    """Base of the run files of pipelines that learn from preferences."""

    data: PreferenceDataConfig
    validation: PreferenceValidation = PreferenceValidation()

    @property
    def sources(self) -> tuple[FileConfig, ...]:
        return (*self.data.sources, *self.validation.sets.values())
