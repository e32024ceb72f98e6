"""What the run files of all pipelines have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from pydantic import Field

from roll.config.base import Config
from roll.config.sections.data import FileConfig
from roll.config.sections.lifecycle import CheckpointConfig, EvaluationConfig, TrackConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.placement import ClusterConfig, DeviceList, parse_devices
from roll.config.sections.roles import Role
from roll.config.sections.strategy import Fsdp2Config, MegatronConfig
from roll.config.sections.training import InferRole, LearnerRole, ScoreRole

RoleConfig = LearnerRole | ScoreRole | InferRole


class RunConfig(Config, ABC):
    """What every pipeline has."""

    pipeline: str
    """What kind of run this is."""
    output_dir: str = Field(min_length=1)
    """Folder of everything the run writes."""
    seed: int = 0
    max_steps: int = Field(ge=1)
    resume: str = "auto"
    """`auto` goes on from the newest complete checkpoint in output_dir; `never` starts anew;
    anything else is the path of a checkpoint."""
    cluster: ClusterConfig = ClusterConfig()
    pools: dict[str, DeviceList] = Field(min_length=1)
    """Name -> job-wide device numbers, like "0-3". Roles that name the same pool share it."""
    model: ModelConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()
    validation: EvaluationConfig

    @property
    @abstractmethod
    def roles(self) -> dict[str, RoleConfig]:
        """Every role that holds devices, by its key in the file."""

    @property
    @abstractmethod
    def sources(self) -> tuple[FileConfig, ...]:
        """All data that the run reads."""

    @abstractmethod
    def total_updates(self, role: Role = Role.ACTOR_TRAIN) -> int:
        """Optimizer steps of the whole run."""

    @property
    def role_pools(self) -> dict[str, str]:
        """The pool of every role that holds devices."""
        return {name: role.pool for name, role in self.roles.items()}

    @property
    def trained(self) -> Mapping[Role, LearnerRole]:
        """The roles whose models learn."""
        roles = self.roles.items()
        return {Role(name): role for name, role in roles if isinstance(role, LearnerRole)}

    @property
    def computing(self) -> dict[str, LearnerRole | ScoreRole]:
        """The roles that train or score."""
        return {n: role for n, role in self.roles.items() if not isinstance(role, InferRole)}

    @property
    def models(self) -> dict[str, ModelConfig]:
        """Key -> model, of all that the file names."""
        own = {f"{name}.model": role.model for name, role in self.computing.items()}
        return {"model": self.model} | {k: model for k, model in own.items() if model is not None}

    @property
    def train_model(self) -> ModelConfig:
        """The model that the policy, or whatever else the run is for, starts from."""
        return self.trained[Role.ACTOR_TRAIN].model or self.model

    @property
    def base_is_reference(self) -> bool:
        """Whether the model that learns is its own reference, with its adapter off."""
        return self.train_model.lora is not None and Role.REFERENCE not in self.roles

    def num_devices(self, role: str) -> int:
        """Devices of the role's pool; for training and scoring also its number of ranks."""
        return len(parse_devices(self.pools[self.role_pools[role]]))

    def num_parts(self, role: str) -> int:
        """Data-parallel ranks of a role that trains or scores: parts that a batch is split into.

        At least 1, also where the layout does not fit the pool, which is a problem of its own.
        """
        strategy = self.computing[role].strategy
        sharers = 1
        if isinstance(strategy, Fsdp2Config | MegatronConfig):
            sharers = strategy.ranks_per_part
        return max(1, self.num_devices(role) // sharers)
