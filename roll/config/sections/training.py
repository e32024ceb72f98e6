"""Settings of batch sizes, and roles that hold a model."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from roll.config.algorithm.losses import ValueLossConfig
from roll.config.base import Config
from roll.config.sections.engines import EngineConfig, VllmConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.optimizers.kinds import AdamWConfig, OptimizerConfig
from roll.config.sections.placement import WorkersConfig
from roll.config.sections.strategy import (
    Fsdp2Config,
    HfScoreConfig,
    ScoreStrategyConfig,
    TrainStrategyConfig,
)


class LearnerRole(WorkersConfig):
    """Role that trains a model."""

    pool: str
    """Name of a pool; one worker runs on each device."""
    strategy: TrainStrategyConfig = Fsdp2Config()
    """Backend that trains."""
    model: ModelConfig | None = None
    """Model of this role. If left out: for actor_train the top-level `model`, for other roles the
    one that actor_train starts from."""
    optimizer: OptimizerConfig = AdamWConfig()
    """Optimizer, its learning rate and schedule. Without a `kind`: adamw."""
    max_tokens_per_microbatch: int = Field(default=16384, ge=1)
    """Number of tokens, padding included, in one forward and backward pass of a device, or of a
    group of devices that share rows. Each patch of a picture counts as one token more."""
    packing: bool = False
    """Put the sequences of a micro-batch one after another into one row, where attention keeps them
    separate, instead of padding them to the longest."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Number of tokens whose logits exist at once while log-probs and entropy are computed."""


class TrainRole(LearnerRole):
    """Role that trains on the samples generated in a step."""

    samples_per_update: int | None = Field(default=None, ge=1)
    """Number of samples per optimizer step, over all ranks. If left out: all samples of the
    step."""
    epochs: int = Field(default=1, ge=1)
    """Number of passes over the samples of a step."""


class CriticRole(TrainRole):
    """Role that learns the values of states. Its model is a language model, which gets a new value
    head, or a token classifier with one label, which has a head already."""

    loss: ValueLossConfig = ValueLossConfig()
    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps at the start in which only the critic learns."""


class ProcessRewardRole(TrainRole):
    """Role that learns what single tokens contribute to success (implicit process rewards of PRIME,
    arXiv 2502.01456). Its model is a language model; the reward of a token is beta * (its log-prob
    minus that of the reference). The logistic function of their sum over a response is trained to
    be the chance that the response is a success, by cross-entropy. Rows that are left out of the
    policy's loss (`algorithm.masks`) are trained on too; of an episode in several rows, each is a
    response."""

    beta: float = Field(default=0.05, gt=0)
    """Factor of the log-ratio of this model and the reference."""
    threshold: float = 0.5
    """Total reward, before any shaping, above which a response counts as a success."""
    score: Literal["after_update", "before_update"] = "after_update"
    """Model that gives the rewards of a step: the one that has learned from the samples of this
    step already (`after_update`), or the one that learned from those of the steps before
    (`before_update`)."""


class ScoreRole(WorkersConfig):
    """Role that only computes log-probs."""

    pool: str
    """Name of a pool; one worker runs on each device."""
    strategy: ScoreStrategyConfig = HfScoreConfig()
    """Backend that computes the log-probs."""
    model: ModelConfig | None = None
    """Model of this role. If left out: the model that training starts from, which is
    actor_train.model or the top-level `model`."""
    max_tokens_per_microbatch: int = Field(default=16384, ge=1)
    """Number of tokens, padding included, in one forward pass of a device, or of a group of devices
    that share rows. Each patch of a picture counts as one token more."""
    packing: bool = False
    """Put the sequences of a micro-batch one after another into one row, as in roles that train."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Number of tokens whose logits exist at once."""


class FollowConfig(Config):
    """Moves of a reference that follows the policy. In a move it becomes `decay` times itself plus
    1 - `decay` times the policy."""

    every: int = Field(default=1, ge=1)
    """Number of steps from one move to the next."""
    decay: float = Field(default=0.0, ge=0, lt=1)
    """Share of the reference that a move keeps. 0: it becomes the policy."""

    @model_validator(mode="after")
    def _check_distance(self) -> Self:
        """Refuse a reference that is the policy in every step."""
        if self.every == 1 and not self.decay:
            raise ValueError(
                "every: with 1, and decay 0, the reference is the policy itself, from which it has "
                "no distance; raise one of the two"
            )
        return self


class FollowingReference(Config):
    """Reference that follows the policy: a copy of the trained weights in `actor_train`, which also
    computes its log-probs."""

    follow: FollowConfig
    """Time and size of its moves."""


def _sort_of_reference(value: Any) -> str:
    """Return the name of the class that the settings of a reference, a mapping or an object, mean:
    with `follow` FollowingReference, else ScoreRole."""
    told = isinstance(value, dict) and "follow" in value
    follows = told or isinstance(value, FollowingReference)
    return FollowingReference.__name__ if follows else ScoreRole.__name__


ReferenceConfig = Annotated[
    Annotated[ScoreRole, Tag("ScoreRole")]
    | Annotated[FollowingReference, Tag("FollowingReference")],
    Discriminator(_sort_of_reference),
]
"""A reference: a frozen model, or, with `follow`, a copy of the policy."""


class TeacherRole(ScoreRole):
    """Role of a teacher: a model that another model learns from, token by token."""

    model: ModelConfig
    """Model of the teacher; must have the student's tokenizer."""
    tags: tuple[str, ...] = Field(default=("default",), min_length=1)
    """Tags of the samples, or rows, that this teacher is responsible for."""


class InferRole(WorkersConfig):
    """Role that generates."""

    pool: str
    """Name of a pool; one replica runs on each `strategy.tp` devices (vLLM: `strategy.tp` times
    `strategy.pp`), of one machine or, with vLLM, of several whole ones."""
    strategy: EngineConfig = VllmConfig()
    """Engine that generates."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the engine's weights. If left out: that of the model."""

    @property
    def devices_per_worker(self) -> int:
        """Number of devices of one replica."""
        return self.strategy.processes

    @property
    def capacity(self) -> int:
        """Number of sequences that one replica decodes at once."""
        return self.strategy.max_num_seqs
