"""Keys that the run files of all pipelines have in which a policy learns from its own samples; the
checks read them."""

from __future__ import annotations

from math import ceil

from roll.config.algorithm import AdvantageConfig, AlgorithmConfig, Need, RewardShapingConfig
from roll.config.run import RoleConfig, RunConfig
from roll.config.sections.data import DataConfig, SourceConfig
from roll.config.sections.domain import DomainConfig
from roll.config.sections.lifecycle import ValidationConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.reward import RewardConfig
from roll.config.sections.roles import Role
from roll.config.sections.rollout import FilterConfig, RolloutConfig
from roll.config.sections.sampling import SamplingConfig
from roll.config.sections.services.judge import ClusterJudgeConfig, JudgeConfig
from roll.config.sections.training import (
    CriticRole,
    FollowConfig,
    FollowingReference,
    InferRole,
    ProcessRewardRole,
    ReferenceConfig,
    ScoreRole,
    TeacherRole,
    TrainRole,
)
from roll.config.sections.weights import WeightSyncConfig


class RlvrBase(RunConfig):
    """Keys of a run in which a policy learns from its own samples, and numbers derived from them,
    before the rules between keys are checked."""

    actor_train: TrainRole
    actor_infer: InferRole
    reference: ReferenceConfig | None = None
    """Frozen copy of the start model, or a copy that follows the policy (`follow`); needed by the
    loss terms `kl` and `dro`, by `kl_in_reward` and by the advantage `prime`, except with an
    adapter (`model.lora`), whose base is the reference."""
    critic: CriticRole | None = None
    """Role that estimates the values of states; needed by the `gae` advantage."""
    process_reward: ProcessRewardRole | None = None
    """Role that learns rewards of single tokens from those of whole samples; needed by the `prime`
    advantage."""
    teachers: dict[str, TeacherRole] = {}
    """Teachers by name; needed by the `distill` advantage and by the `distill` loss term."""
    data: DataConfig
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    rewards: dict[str, RewardConfig] = {}
    """Rewards by name; the name appears in the metrics. May be empty if only teachers judge the
    samples."""
    judges: dict[str, JudgeConfig] = {}
    """Models that decide rewards, by name; a reward names one in `judge.by`."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    domains: dict[str, DomainConfig] = {}
    """Settings for the samples of single tags, by tag: weights of rewards, normalisation, filters,
    advantage and sampling. A tag without an entry uses the settings of the run."""
    validation: ValidationConfig = ValidationConfig()

    @property
    def generates(self) -> bool:
        """True if engines write the samples of the run; False if it trains on kept ones."""
        return self.rollout.replay is None

    @property
    def roles_overlap(self) -> bool:
        """True if the policy trains, or models judge, while engines generate."""
        judging = any(reward.model is not None for reward in self.rewards.values())
        early = self.rollout.max_staleness > 0
        return self.generates and (early or judging or bool(self.cluster_judges))

    @property
    def roles(self) -> dict[str, RoleConfig]:
        """Every role that uses devices, by its key in the file; a teacher has the key
        `teachers.<name>`, a judge `judges.<name>`. Without engines, those that train and score."""
        named: dict[str, RoleConfig | None] = {
            Role.ACTOR_TRAIN: self.actor_train,
            Role.ACTOR_INFER: self.actor_infer if self.generates else None,
            Role.REFERENCE: self.reference_role,
            Role.CRITIC: self.critic,
            Role.PROCESS_REWARD: self.process_reward,
            **{f"teachers.{name}": role for name, role in self.teachers.items()},
        }
        if self.generates:
            named |= {f"judges.{name}": role for name, role in self.cluster_judges.items()}
        return {name: role for name, role in named.items() if role is not None}

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """All data that the run reads: none if it does not generate."""
        return (*self.data.sources, *self.validation.sets.values()) if self.generates else ()

    @property
    def models(self) -> dict[str, ModelConfig]:
        """All models that the run loads, those of rewards and judges included, by their keys."""
        if not self.generates:
            return super().models
        rewards = {f"rewards.{name}.model": reward.model for name, reward in self.rewards.items()}
        judges = {f"judges.{name}.model": one.model for name, one in self.cluster_judges.items()}
        named = {key: model for key, model in rewards.items() if model is not None}
        return super().models | named | judges

    @property
    def cluster_judges(self) -> dict[str, ClusterJudgeConfig]:
        """Judges on devices of the run, by name."""
        judges = self.judges.items()
        return {name: one for name, one in judges if isinstance(one, ClusterJudgeConfig)}

    def judge_tokens(self, judge: str) -> int:
        """Return the largest number of tokens of a question and its answer together; KeyError if no
        judge on devices of the run has this name."""
        asking = (one.judge for one in self.rewards.values() if one.judge and one.judge.by == judge)
        longest = max((one.max_new_tokens for one in asking), default=1)
        return self.cluster_judges[judge].max_question_tokens + longest

    def sharers(self, judge: str) -> int:
        """Return the number of reward workers that ask the judge of this name, and so share its
        limits; 0 if no reward names it."""
        asking = (one for one in self.rewards.values() if one.judge and one.judge.by == judge)
        return sum(one.workers for one in asking)

    @property
    def trained(self) -> dict[Role, TrainRole]:
        """Roles whose models are trained: `actor_train` and, if there are any, `critic` and
        `process_reward`."""
        beside = {Role.CRITIC: self.critic, Role.PROCESS_REWARD: self.process_reward}
        found = {role: settings for role, settings in beside.items() if settings is not None}
        return {Role.ACTOR_TRAIN: self.actor_train, **found}

    @property
    def has_step_rewards(self) -> bool:
        """True if single steps of a sample may have rewards of their own, whose places only its
        tokens tell."""
        return bool(self.step_rewards)

    @property
    def step_rewards(self) -> dict[str, tuple[str, ...]]:
        """Tags of the samples whose steps may have rewards of their own, by the key that says
        so."""
        rewards = self.rewards.items()
        return {f"rewards.{name}.process": one.tags for name, one in rewards if one.process}

    def reward_weights(self, tag: str) -> dict[str, float]:
        """Return the weight that each reward of the run has for samples of this tag."""
        own = self.domains[tag].rewards if tag in self.domains else {}
        return {name: own.get(name, reward.weight) for name, reward in self.rewards.items()}

    @property
    def advantages(self) -> dict[str, AdvantageConfig]:
        """Every advantage estimator, by its key in the file."""
        own = {f"domains.{tag}.advantage": each.advantage for tag, each in self.domains.items()}
        found = {key: advantage for key, advantage in own.items() if advantage is not None}
        return {"algorithm.advantage": self.algorithm.advantage} | found

    @property
    def reward_shapings(self) -> dict[str, tuple[RewardShapingConfig, ...]]:
        """Every list of reward shaping, by its key in the file."""
        own = {f"domains.{tag}.reward_shaping": d.reward_shaping for tag, d in self.domains.items()}
        found = {key: parts for key, parts in own.items() if parts is not None}
        return {"algorithm.reward_shaping": self.algorithm.reward_shaping} | found

    @property
    def shaped_advantages(
        self,
    ) -> list[tuple[AdvantageConfig, str, tuple[RewardShapingConfig, ...]]]:
        """The estimator of the run and of each entry in `domains`, with the key of the shaping of
        the rewards that it reads, and this shaping."""
        run = self.algorithm
        own = [(self.advantage_of(tag), *self.shaping_of(tag)) for tag in self.domains]
        return [(run.advantage, "algorithm.reward_shaping", run.reward_shaping), *own]

    def shaping_of(self, tag: str) -> tuple[str, tuple[RewardShapingConfig, ...]]:
        """Return the reward shaping of a tag, with its key in the file."""
        own = self.domains[tag].reward_shaping if tag in self.domains else None
        if own is None:
            return "algorithm.reward_shaping", self.algorithm.reward_shaping
        return f"domains.{tag}.reward_shaping", own

    @property
    def filters(self) -> dict[str, tuple[FilterConfig, ...]]:
        """Every list of filters, by its key in the file."""
        own = {f"domains.{tag}.filters": each.filters for tag, each in self.domains.items()}
        found = {key: parts for key, parts in own.items() if parts is not None}
        return {"rollout.filters": self.rollout.filters} | found

    @property
    def domain_sampling(self) -> dict[str, SamplingConfig]:
        """Sampling in training of each tag that has an entry in `domains`."""
        return {tag: each.sampling.over(self.sampling) for tag, each in self.domains.items()}

    @property
    def has_temperatures(self) -> bool:
        """True if some tag has a sampling temperature of its own, which may equal that of the
        run."""
        return any(each.sampling.temperature is not None for each in self.domains.values())

    def temperature(self, tag: str) -> float:
        """Return the temperature at which training samples with this tag are drawn."""
        return self.domain_sampling.get(tag, self.sampling).temperature

    @property
    def samplings(self) -> dict[str, SamplingConfig]:
        """Every sampling of training, by its key in the file."""
        own = {f"domains.{tag}.sampling": each for tag, each in self.domain_sampling.items()}
        return {"sampling": self.sampling} | own

    @property
    def players(self) -> dict[str, InferRole]:
        """Every role whose engines follow the samplings of the run, by its key in the file."""
        return {Role.ACTOR_INFER: self.actor_infer} if self.generates else {}

    @property
    def needs(self) -> dict[Need, list[str]]:
        """Requirements of the algorithm and of the domains on the rest of the config, each with the
        parts that have it."""
        found = {need: list(parts) for need, parts in self.algorithm.needs.items()}
        for tag, domain in self.domains.items():
            own = [] if domain.advantage is None else [domain.advantage]
            for choice in (*own, *(domain.reward_shaping or ())):
                for need in sorted(choice.all_needs):
                    found.setdefault(need, []).append(f"{choice.kind} of domains.{tag}")
        return found

    def advantage_of(self, tag: str) -> AdvantageConfig:
        """Return the advantage estimator of this tag."""
        own = self.domains[tag].advantage if tag in self.domains else None
        return own or self.algorithm.advantage

    def needs_greedy(self, tag: str) -> bool:
        """Return whether the advantages of this tag compare with a greedy response."""
        return Need.GREEDY_BASELINE in self.advantage_of(tag).all_needs

    @property
    def num_replicas(self) -> int:
        """Number of inference engines; 0 if the run does not generate."""
        if not self.generates:
            return 0
        return self.num_devices(Role.ACTOR_INFER) // self.actor_infer.devices_per_worker

    @property
    def nodes_of_engine(self) -> int:
        """Number of machines that an engine of the policy lies on."""
        per_node = self.cluster.devices_per_node
        return ceil(self.actor_infer.devices_per_worker / per_node) if per_node else 1

    @property
    def samples_per_step(self) -> int:
        """Number of samples that a step trains on, over all prompts and ranks."""
        return self.data.prompts_per_step * self.data.samples_per_prompt

    @property
    def compared_samples(self) -> int:
        """Smallest number of samples of a prompt that are compared with one another."""
        return self.data.samples_per_prompt

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

    def progress(self, step: int) -> float:
        """Return the part of the run that is done at a step, 0 in the first and 1 in the last."""
        return step / max(self.max_steps - 1, 1)

    @property
    def scores_old_logprobs(self) -> bool:
        """True if `old_logprobs` are computed in an extra forward pass."""
        algorithm = self.algorithm
        if algorithm.old_logprobs == "rollout":
            return False
        return (
            self.updates_per_step() > 1
            or algorithm.old_logprobs == "recompute"
            or Need.OLD_LOGPROBS in self.needs
            or Need.SQUARED_PROBS in self.needs
        )

    @property
    def validation_sampling(self) -> SamplingConfig:
        """Sampling of validation: `validation.sampling`, or that of training if it is left out."""
        return self.validation.sampling or self.sampling

    @property
    def validation_samplings(self) -> dict[str, SamplingConfig]:
        """Sampling that only validation has, by its key in the file; empty if there is none."""
        own = self.validation.sampling
        return {"validation.sampling": own} if own is not None else {}

    @property
    def longest_response(self) -> int:
        """Largest number of tokens of a response in training, over all tags."""
        return max(sampling.max_new_tokens for sampling in self.samplings.values())

    @property
    def max_sequence_tokens(self) -> int:
        """Largest number of tokens of prompt and response together, in training and validation."""
        longest = self.longest_response
        if self.validation.sets:
            longest = max(longest, self.validation_sampling.max_new_tokens)
        return self.data.max_prompt_tokens + longest

    @property
    def max_row_tokens(self) -> int:
        """Largest number of tokens of a sample in training, its prompt included."""
        return self.data.max_prompt_tokens + self.longest_response

    @property
    def max_response_tokens(self) -> int:
        """Largest number of tokens of a sample after its prompt, of tags without an entry in
        `domains`."""
        return self.sampling.max_new_tokens

    def max_response_tokens_of(self, tag: str) -> int:
        """Return the largest number of tokens of a sample of this tag after its prompt."""
        return self.domain_sampling.get(tag, self.sampling).max_new_tokens

    @property
    def reference_role(self) -> ScoreRole | None:
        """Role of a frozen reference."""
        return self.reference if isinstance(self.reference, ScoreRole) else None

    @property
    def follow(self) -> FollowConfig | None:
        """Moves of a reference that follows the policy; None if none does."""
        return None if not isinstance(self.reference, FollowingReference) else self.reference.follow

    @property
    def reference_model(self) -> ModelConfig:
        """Model of a frozen reference: its own, or the one that training starts from."""
        own = self.reference_role.model if self.reference_role else None
        return own or self.train_model

    @property
    def process_reward_model(self) -> ModelConfig:
        """Model that `process_reward` starts from: its own, or the one that the policy starts
        from."""
        own = self.process_reward.model if self.process_reward else None
        return own or self.train_model

    @property
    def critic_model(self) -> ModelConfig:
        """Model of the critic: its own, or the one that the policy starts from."""
        own = self.critic.model if self.critic else None
        return own or self.train_model
