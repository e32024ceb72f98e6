"""`pipeline: sft`, `distill`, `dpo`, `reward_model`: training on rows at hand."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from roll.config.algorithm.divergences import DistillTargetConfig
from roll.config.algorithm.preferences import (
    BradleyTerryConfig,
    PreferenceLossConfig,
    SigmoidConfig,
)
from roll.config.checks.common import raise_if_any
from roll.config.checks.offline import (
    distill_problems,
    dpo_problems,
    offline_problems,
    pairs_only,
    scores_only,
)
from roll.config.errors import ConfigError
from roll.config.run import RoleConfig, RunConfig
from roll.config.sections.data import (
    FileConfig,
    PreferenceDataConfig,
    RowsConfig,
    TaughtDataConfig,
    TaughtSource,
    TextDataConfig,
)
from roll.config.sections.lifecycle import PreferenceValidation, TaughtValidation, TextValidation
from roll.config.sections.roles import Role
from roll.config.sections.training import LearnerRole, ScoreRole, TeacherRole

NO_LIMIT = 2**62
"""Of steps."""


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


class SftConfig(OfflineConfig):
    """Supervised fine-tuning: to write what others wrote."""

    pipeline: Literal["sft"] = "sft"
    data: TextDataConfig
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Every trained token counts the same, or every sequence."""
    validation: TextValidation = TextValidation()

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        raise_if_any(offline_problems(self))
        return self

    @property
    def sources(self) -> tuple[FileConfig, ...]:
        return (*self.data.sources, *self.validation.sets.values())


class DistillLossConfig(DistillTargetConfig):
    """coef * divergence from the teacher + sft_coef * -log p of the text itself."""

    coef: float = Field(default=1.0, gt=0)
    """Factor of the divergence, in nats."""
    sft_coef: float = Field(default=0.0, ge=0)
    """Factor of -log p."""


class DistillationConfig(OfflineConfig):
    """Distillation on texts at hand: to expect of every token what a teacher expects of it."""

    pipeline: Literal["distill"] = "distill"
    data: TaughtDataConfig
    teachers: dict[str, TeacherRole] = Field(min_length=1)
    """Name -> teacher; each has the rows of its tags."""
    loss: DistillLossConfig = DistillLossConfig()
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Every trained token counts the same, or every sequence."""
    validation: TaughtValidation = TaughtValidation()

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        raise_if_any([*offline_problems(self), *distill_problems(self)])
        return self

    @property
    def sources(self) -> tuple[TaughtSource, ...]:
        return (*self.data.sources, *self.validation.sets.values())

    @property
    def roles(self) -> dict[str, RoleConfig]:
        teachers = {f"teachers.{name}": role for name, role in self.teachers.items()}
        return {Role.ACTOR_TRAIN: self.actor_train, **teachers}


class PreferenceConfig(OfflineConfig):
    """Learning from preferences."""

    data: PreferenceDataConfig
    validation: PreferenceValidation = PreferenceValidation()

    @property
    def sources(self) -> tuple[FileConfig, ...]:
        return (*self.data.sources, *self.validation.sets.values())


class DpoConfig(PreferenceConfig):
    """Direct preference optimization, and its relatives."""

    pipeline: Literal["dpo"] = "dpo"
    loss: PreferenceLossConfig = SigmoidConfig()
    reference: ScoreRole | None = None
    """Frozen copy of the start model; needed by losses that compare with it."""
    reference_logprobs: Literal["per_step", "once"] = "per_step"
    """Score a row whenever it comes, or the first time only; it is kept in memory until the run
    ends."""

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        raise_if_any([*offline_problems(self), *dpo_problems(self)])
        return self

    @property
    def roles(self) -> dict[str, RoleConfig]:
        found: dict[str, RoleConfig] = {Role.ACTOR_TRAIN: self.actor_train}
        if self.reference is not None:
            found[Role.REFERENCE] = self.reference
        return found


class RewardModelConfig(PreferenceConfig):
    """A model that scores responses, learned from pairs."""

    pipeline: Literal["reward_model"] = "reward_model"
    loss: BradleyTerryConfig = BradleyTerryConfig()

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        raise_if_any([*offline_problems(self), *pairs_only(self), *scores_only(self)])
        return self
