"""Settings that the run files of all pipelines have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Self

from pydantic import Field

from roll.config.base import Config
from roll.config.sections.data import FileConfig
from roll.config.sections.lifecycle import (
    CheckpointConfig,
    EvaluationConfig,
    ProfileConfig,
    TrackConfig,
)
from roll.config.sections.model import ModelConfig
from roll.config.sections.placement import ClusterConfig, DeviceList, parse_devices
from roll.config.sections.roles import Role
from roll.config.sections.strategy import Fsdp2Config, MegatronConfig
from roll.config.sections.training import InferRole, LearnerRole, ScoreRole

RoleConfig = LearnerRole | ScoreRole | InferRole


class RunConfig(Config, ABC):
    """Base of the run files of all pipelines."""

    pipeline: str
    """Name of the pipeline, which is the kind of run; or the import path of a class of yours,
    `my_module:MyPipeline`."""
    output_dir: str = Field(min_length=1)
    """Folder of everything that the run writes."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of everything that is drawn: the order of rows, samples, tasks, new weights."""
    max_steps: int = Field(ge=1)
    """Number of steps after which the run ends."""
    resume: str = "auto"
    """Checkpoint to continue from. `auto`: the newest complete checkpoint in output_dir. `never`:
    start from the beginning. Any other value is the path of a checkpoint, or the URL of a copy that
    `checkpoint.upload` made, which is first copied to `fetched/` in output_dir."""
    stop_at: datetime | None = None
    """Date and time, such as `2030-01-31 18:00`, from which on no further step begins: the run
    saves a checkpoint and ends with code 75, as after SIGTERM. Without a zone: the machine's local
    time."""
    cluster: ClusterConfig = ClusterConfig()
    pools: dict[str, DeviceList] = Field(min_length=1)
    """Device pools: name -> device numbers of the job, for example "0-3". Roles that name the same
    pool share its devices."""
    model: ModelConfig
    """Model that training starts from, unless `actor_train.model` names another one."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()
    profile: ProfileConfig | None = None
    """Steps that are recorded in detail. null: none."""
    validation: EvaluationConfig

    @property
    @abstractmethod
    def roles(self) -> dict[str, RoleConfig]:
        """Every role that uses devices, by its key in the file."""

    @property
    @abstractmethod
    def sources(self) -> tuple[FileConfig, ...]:
        """All data that the run reads."""

    @abstractmethod
    def total_updates(self, role: Role = Role.ACTOR_TRAIN) -> int:
        """Return the number of optimizer steps of the role in the whole run."""

    @property
    def roles_overlap(self) -> bool:
        """True if roles compute at the same time; without GPUs they may share cores."""
        return False

    @property
    def role_pools(self) -> dict[str, str]:
        """Pool of every role that uses devices, by the role's key."""
        return {name: role.pool for name, role in self.roles.items()}

    @property
    def trained(self) -> Mapping[Role, LearnerRole]:
        """Roles whose models are trained."""
        roles = self.roles.items()
        return {Role(name): role for name, role in roles if isinstance(role, LearnerRole)}

    @property
    def computing(self) -> dict[str, LearnerRole | ScoreRole]:
        """Roles that train or score, by their keys."""
        return {n: role for n, role in self.roles.items() if not isinstance(role, InferRole)}

    @property
    def models(self) -> dict[str, ModelConfig]:
        """All models that the file names, by their keys."""
        own = {f"{name}.model": role.model for name, role in self.computing.items()}
        return {"model": self.model} | {k: model for k, model in own.items() if model is not None}

    def with_models(self, change: Callable[[str, ModelConfig], ModelConfig]) -> Self:
        """Return the config with each of its `models` changed.

        Args:
            change: takes a model's key and the model, and returns what takes its place.
        """
        changes: dict[str, Any] = {}
        for key, model in self.models.items():
            group, _, name = key.removesuffix("model").rstrip(".").partition(".")
            changed = {"model": change(key, model)}
            if not group:
                changes |= changed
                continue
            owners = changes.get(group, getattr(self, group))
            if name:
                changes[group] = {**owners, name: owners[name].model_copy(update=changed)}
            else:
                changes[group] = owners.model_copy(update=changed)
        return self.model_copy(update=changes)

    @property
    def train_model(self) -> ModelConfig:
        """Model that training starts from."""
        return self.trained[Role.ACTOR_TRAIN].model or self.model

    def model_key(self, role: str) -> str:
        """Return the key in the file of the model that a role which trains or scores loads."""
        own = (f"{role}.model", f"{Role.ACTOR_TRAIN}.model")
        return next((key for key in own if key in self.models), "model")

    @property
    def base_is_reference(self) -> bool:
        """True if the trained model is its own reference, with its adapter switched off."""
        return self.train_model.lora is not None and Role.REFERENCE not in self.roles

    def num_devices(self, role: str) -> int:
        """Return the number of devices in the role's pool; for training and scoring this is also
        the number of ranks."""
        return len(parse_devices(self.pools[self.role_pools[role]]))

    def num_parts(self, role: str) -> int:
        """Return the number of data-parallel ranks of a role that trains or scores, which is the
        number of parts that a batch is split into.

        Return at least 1, even if the layout does not fit the pool; that mistake is reported
        elsewhere.
        """
        strategy = self.computing[role].strategy
        sharers = 1
        if isinstance(strategy, Fsdp2Config | MegatronConfig):
            sharers = strategy.ranks_per_part
        return max(1, self.num_devices(role) // sharers)
