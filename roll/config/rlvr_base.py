"""Keys of the run file of `pipeline: rlvr`; the checks read them."""

from __future__ import annotations

from typing import Literal

from roll.config.algorithm import AlgorithmConfig, Need
from roll.config.run import RoleConfig, RunConfig
from roll.config.sections.data import DataConfig, SourceConfig
from roll.config.sections.lifecycle import ValidationConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.reward import RewardConfig
from roll.config.sections.roles import Role
from roll.config.sections.rollout import RolloutConfig
from roll.config.sections.sampling import SamplingConfig
from roll.config.sections.training import CriticRole, InferRole, ScoreRole, TeacherRole, TrainRole
from roll.config.sections.weights import WeightSyncConfig


class RlvrBase(RunConfig):
    """Keys of `pipeline: rlvr` and numbers derived from them, before the rules between keys are
    checked."""

    pipeline: Literal["rlvr"] = "rlvr"
    actor_train: TrainRole
    actor_infer: InferRole
    reference: ScoreRole | None = None
    """Frozen copy of the start model; needed by the loss terms `kl` and `dro` and by
    `kl_in_reward`, except with an adapter (`model.lora`), whose base is the reference."""
    critic: CriticRole | None = None
    """Role that estimates the values of states; needed by the `gae` advantage."""
    teachers: dict[str, TeacherRole] = {}
    """Teachers by name; needed by the `distill` advantage and by the `distill` loss term."""
    data: DataConfig
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    rewards: dict[str, RewardConfig] = {}
    """Rewards by name; the name appears in the metrics. May be empty if only teachers judge the
    samples."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    validation: ValidationConfig = ValidationConfig()

    @property
    def roles(self) -> dict[str, RoleConfig]:
        """Every role that uses devices, by its key in the file; a teacher has the key
        `teachers.<name>`."""
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
    def models(self) -> dict[str, ModelConfig]:
        rewards = {f"rewards.{name}.model": reward.model for name, reward in self.rewards.items()}
        return super().models | {key: model for key, model in rewards.items() if model is not None}

    @property
    def trained(self) -> dict[Role, TrainRole]:
        found = {Role.ACTOR_TRAIN: self.actor_train}
        return found | ({Role.CRITIC: self.critic} if self.critic else {})

    @property
    def num_replicas(self) -> int:
        """Number of inference engines."""
        return self.num_devices(Role.ACTOR_INFER) // self.actor_infer.devices_per_worker

    @property
    def samples_per_step(self) -> int:
        return self.data.prompts_per_step * self.data.samples_per_prompt

    def samples_per_update(self, role: Role = Role.ACTOR_TRAIN) -> int:
        """Return the number of samples of one optimizer step of the role, over all ranks."""
        return self.trained[role].samples_per_update or self.samples_per_step

    def updates_per_pass(self, role: Role = Role.ACTOR_TRAIN) -> int:
        """Return the number of optimizer steps of one pass over the samples of a step."""
        return self.samples_per_step // self.samples_per_update(role)

    def updates_per_step(self, role: Role = Role.ACTOR_TRAIN) -> int:
        """Return the number of optimizer steps of the role in one step, over all its passes."""
        return self.updates_per_pass(role) * self.trained[role].epochs

    def total_updates(self, role: Role = Role.ACTOR_TRAIN) -> int:
        """Return the number of optimizer steps of the whole run; the policy has none while the
        critic warms up."""
        waits = self.critic.warmup_steps if self.critic and role is Role.ACTOR_TRAIN else 0
        return max(self.max_steps - waits, 0) * self.updates_per_step(role)

    @property
    def scores_old_logprobs(self) -> bool:
        """True if `old_logprobs` are computed in an extra forward pass."""
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
        """Largest number of tokens of prompt and response together, in training and validation."""
        longest = self.sampling.max_new_tokens
        if self.validation.sets:
            longest = max(longest, self.validation_sampling.max_new_tokens)
        return self.data.max_prompt_tokens + longest

    @property
    def reference_model(self) -> ModelConfig:
        """Model of the reference: its own, or the one that training starts from."""
        own = self.reference.model if self.reference else None
        return own or self.train_model

    @property
    def critic_model(self) -> ModelConfig:
        """Model of the critic: its own, or the one that the policy starts from."""
        own = self.critic.model if self.critic else None
        return own or self.train_model
