"""Run files of pipelines that train on existing rows: `sft`, `distill`, `dpo`, `reward_model`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from roll.config.algorithm.divergences import DistillLossConfig
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
    reward_model_problems,
)
from roll.config.offline_base import OfflineConfig, PreferenceConfig
from roll.config.run import RoleConfig
from roll.config.sections.data import (
    FileConfig,
    TaughtDataConfig,
    TaughtSource,
    TextDataConfig,
)
from roll.config.sections.lifecycle import TaughtValidation, TextValidation
from roll.config.sections.roles import Role
from roll.config.sections.training import ScoreRole, TeacherRole


class SftConfig(OfflineConfig):
    """Supervised fine-tuning: the model learns to write the texts of the data."""

    pipeline: str = "sft"
    data: TextDataConfig
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Reduction of the loss: every trained token counts the same, or every sequence does."""
    validation: TextValidation = TextValidation()

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        """Check the rules between keys; raise one ValueError that names all problems."""
        raise_if_any(offline_problems(self))
        return self

    @property
    def sources(self) -> tuple[FileConfig, ...]:
        return (*self.data.sources, *self.validation.sets.values())


class DistillationConfig(OfflineConfig):
    """Distillation on existing texts: the model learns the teacher's distribution of every next
    token."""

    pipeline: str = "distill"
    data: TaughtDataConfig
    teachers: dict[str, TeacherRole] = Field(min_length=1)
    """Teachers by name; each teacher is responsible for the rows with its tags."""
    loss: DistillLossConfig = DistillLossConfig()
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Reduction of the loss: every trained token counts the same, or every sequence does."""
    validation: TaughtValidation = TaughtValidation()

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        """Check the rules between keys; raise one ValueError that names all problems."""
        problems = distill_problems(self.teachers, self.data, self.validation)
        raise_if_any([*offline_problems(self), *problems])
        return self

    @property
    def sources(self) -> tuple[TaughtSource, ...]:
        return (*self.data.sources, *self.validation.sets.values())

    @property
    def roles(self) -> dict[str, RoleConfig]:
        """The trained role and the teachers, by their keys in the file (`teachers.<name>`)."""
        teachers = {f"teachers.{name}": role for name, role in self.teachers.items()}
        return {Role.ACTOR_TRAIN: self.actor_train, **teachers}


class DpoConfig(PreferenceConfig):
    """Direct preference optimization and related losses."""

    pipeline: str = "dpo"
    loss: PreferenceLossConfig = SigmoidConfig()
    """Loss of a pair, or of a response with a label."""
    reference: ScoreRole | None = None
    """Frozen copy of the start model; needed by losses that compare the policy with a reference."""
    reference_logprobs: Literal["per_step", "once"] = "per_step"
    """Time at which the reference scores a row: every time that the row is used (`per_step`), or
    only the first time (`once`). With `once` the log-probs stay in memory until the run ends, and
    are part of its checkpoints."""

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        """Check the rules between keys; raise one ValueError that names all problems."""
        problems = dpo_problems(self, self.loss, self.reference, self.reference_logprobs)
        raise_if_any([*offline_problems(self), *problems])
        return self

    @property
    def roles(self) -> dict[str, RoleConfig]:
        """The trained role and, if there is one, the reference, by their keys in the file."""
        found: dict[str, RoleConfig] = {Role.ACTOR_TRAIN: self.actor_train}
        if self.reference is not None:
            found[Role.REFERENCE] = self.reference
        return found


class RewardModelConfig(PreferenceConfig):
    """Training of a reward model, which scores responses, on pairs."""

    pipeline: str = "reward_model"
    loss: BradleyTerryConfig = BradleyTerryConfig()

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        """Check the rules between keys; raise one ValueError that names all problems."""
        raise_if_any([*offline_problems(self), *reward_model_problems(self)])
        return self
