"""One class per pipeline: the whole of a run file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, Self

from pydantic import Field, model_validator

from roll.config.algorithm import AlgorithmConfig, Need
from roll.config.base import Config
from roll.config.checks import check_rlvr
from roll.config.data import DataConfig, SourceConfig
from roll.config.lifecycle import CheckpointConfig, TrackConfig, ValidationConfig
from roll.config.model import ModelConfig
from roll.config.placement import ClusterConfig, DeviceList, parse_devices
from roll.config.reward import RewardConfig
from roll.config.roles import Role
from roll.config.rollout import RolloutConfig
from roll.config.sampling import SamplingConfig
from roll.config.strategy import MegatronConfig
from roll.config.training import CriticRole, InferRole, ScoreRole, TeacherRole, TrainRole
from roll.config.weights import WeightSyncConfig

RoleConfig = TrainRole | ScoreRole | InferRole


class RunConfig(Config, ABC):
    """What every pipeline has."""

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

    @property
    @abstractmethod
    def roles(self) -> dict[str, RoleConfig]:
        """Every role that holds devices, by its key in the file."""

    @property
    @abstractmethod
    def sources(self) -> tuple[SourceConfig, ...]:
        """All data that the run reads."""

    @property
    def role_pools(self) -> dict[str, str]:
        """The pool of every role that holds devices."""
        return {name: role.pool for name, role in self.roles.items()}

    @property
    def trained(self) -> dict[Role, TrainRole]:
        """The roles whose models learn."""
        roles = self.roles.items()
        return {Role(name): role for name, role in roles if isinstance(role, TrainRole)}

    @property
    def computing(self) -> dict[str, TrainRole | ScoreRole]:
        """The roles that train or score."""
        return {n: role for n, role in self.roles.items() if not isinstance(role, InferRole)}

    @property
    def models(self) -> dict[str, ModelConfig]:
        """Key -> model, of all that the file names."""
        own = {f"{name}.model": role.model for name, role in self.computing.items()}
        return {"model": self.model} | {k: model for k, model in own.items() if model is not None}

    def num_devices(self, role: str) -> int:
        """Devices of the role's pool; for training and scoring also its number of ranks."""
        return len(parse_devices(self.pools[self.role_pools[role]]))

    def num_parts(self, role: str) -> int:
        """Data-parallel ranks of a role that trains or scores: parts that a batch is split into.

        At least 1, also where the layout does not fit the pool, which is a problem of its own.
        """
        strategy = self.computing[role].strategy
        copy = strategy.ranks_per_copy if isinstance(strategy, MegatronConfig) else 1
        return max(1, self.num_devices(role) // copy)


class RlvrConfig(RunConfig):
    """Reinforcement learning from verifiable rewards."""

    pipeline: Literal["rlvr"] = "rlvr"
    actor_train: TrainRole
    actor_infer: InferRole
    reference: ScoreRole | None = None
    """Frozen copy of the start model; needed by a `kl` loss term."""
    critic: CriticRole | None = None
    """Needed by the `gae` advantage."""
    teachers: dict[str, TeacherRole] = {}
    """Name -> teacher; needed by the `distill` advantage."""
    data: DataConfig
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    rewards: dict[str, RewardConfig] = Field(min_length=1)
    """Name -> reward; the name appears in the metrics."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    validation: ValidationConfig = ValidationConfig()

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        check_rlvr(self)
        return self

    @property
    def roles(self) -> dict[str, RoleConfig]:
        """Every role that holds devices; a teacher is `teachers.<name>`."""
        named: dict[str, RoleConfig | None] = {
            Role.ACTOR_TRAIN: self.actor_train,
            Role.ACTOR_INFER: self.actor_infer,
            Role.REFERENCE: self.reference,
            Role.CRITIC: self.critic,
            **{f"teachers.{name}": role for name, role in self.teachers.items()},
        }
        return {name: role for name, role in named.items() if role is not None}

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        return (*self.data.sources, *self.validation.sets.values())

    @property
    def num_replicas(self) -> int:
        """Inference engines."""
        return self.num_devices(Role.ACTOR_INFER) // self.actor_infer.devices_per_worker

    @property
    def samples_per_step(self) -> int:
        return self.data.prompts_per_step * self.data.samples_per_prompt

    def samples_per_update(self, role: Role = Role.ACTOR_TRAIN) -> int:
        """Samples of one optimizer step of the role, over all ranks."""
        return self.trained[role].samples_per_update or self.samples_per_step

    def updates_per_pass(self, role: Role = Role.ACTOR_TRAIN) -> int:
        """Optimizer steps of one pass over the samples of a step."""
        return self.samples_per_step // self.samples_per_update(role)

    def updates_per_step(self, role: Role = Role.ACTOR_TRAIN) -> int:
        """Optimizer steps of one step."""
        return self.updates_per_pass(role) * self.trained[role].epochs

    def total_updates(self, role: Role = Role.ACTOR_TRAIN) -> int:
        """Optimizer steps of the whole run; the actor has none while the critic warms up."""
        waits = self.critic.warmup_steps if self.critic and role is Role.ACTOR_TRAIN else 0
        return max(self.max_steps - waits, 0) * self.updates_per_step(role)

    @property
    def scores_old_logprobs(self) -> bool:
        """Whether a forward pass of its own computes `old_logprobs`."""
        algorithm = self.algorithm
        if algorithm.old_logprobs == "rollout":
            return False
        return (
            self.updates_per_step() > 1
            or algorithm.old_logprobs == "recompute"
            or Need.OLD_LOGPROBS in algorithm.needs
        )

    @property
    def validation_sampling(self) -> SamplingConfig:
        return self.validation.sampling or self.sampling

    @property
    def max_sequence_tokens(self) -> int:
        """Longest prompt plus longest response, training and validation."""
        longest = self.sampling.max_new_tokens
        if self.validation.sets:
            longest = max(longest, self.validation_sampling.max_new_tokens)
        return self.data.max_prompt_tokens + longest

    @property
    def train_model(self) -> ModelConfig:
        return self.actor_train.model or self.model

    @property
    def reference_model(self) -> ModelConfig:
        """The reference's own model, or the one that training starts from."""
        own = self.reference.model if self.reference else None
        return own or self.train_model

    @property
    def critic_model(self) -> ModelConfig:
        """The critic's own model, or the one that the policy starts from."""
        own = self.critic.model if self.critic else None
        return own or self.train_model


PIPELINES: dict[str, type[RlvrConfig]] = {"rlvr": RlvrConfig}
