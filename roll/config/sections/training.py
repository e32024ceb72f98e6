"""Optimizer, schedule, batch sizes, and the roles that hold a model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roll.config.algorithm.losses import ValueLossConfig
from roll.config.base import Config
from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import (
    EngineConfig,
    Fsdp2Config,
    HfScoreConfig,
    ScoreStrategyConfig,
    TrainStrategyConfig,
    VllmConfig,
)

Share = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Config):
    """AdamW and its learning-rate schedule; steps are optimizer steps."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled; on matrices only, never on norms and biases."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""
    eps: float = Field(default=1e-8, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or decay to `min_lr_ratio` of the peak at the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Linear from zero."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)


class LearnerRole(Config):
    """A role that trains a model."""

    pool: str
    """Name of a pool; one worker per device."""
    strategy: TrainStrategyConfig = Fsdp2Config()
    model: ModelConfig | None = None
    """Left out: the top-level `model`."""
    optimizer: OptimizerConfig = OptimizerConfig()
    max_tokens_per_microbatch: int = Field(default=16384, ge=1)
    """Tokens, padding included, in one forward and backward pass of a device, or of devices that
    share rows."""
    packing: bool = False
    """Put the sequences of a micro-batch behind each other in one row, where attention keeps them
    apart, instead of padding them to the longest."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Tokens whose logits exist at once when log-probs and entropy are computed."""


class TrainRole(LearnerRole):
    """A role that trains on what was generated in a step."""

    samples_per_update: int | None = Field(default=None, ge=1)
    """Samples per optimizer step, over all ranks; left out: all samples of the step."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the samples of a step."""


class CriticRole(TrainRole):
    """A role that learns what states are worth. Its model is a language model, which gets a new
    head, or a token classifier with one label, which brings its own."""

    loss: ValueLossConfig = ValueLossConfig()
    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start in which only the critic learns."""


class ScoreRole(Config):
    """A role that only computes log-probs."""

    pool: str
    strategy: ScoreStrategyConfig = HfScoreConfig()
    model: ModelConfig | None = None
    """Left out: the model that training starts from, actor_train.model or the top-level `model`."""
    max_tokens_per_microbatch: int = Field(default=16384, ge=1)
    """Tokens, padding included, in one forward pass of a device, or of devices that share
    rows."""
    packing: bool = False
    """As that of a role that trains."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Tokens whose logits exist at once."""


class TeacherRole(ScoreRole):
    """A model that another one learns from, token by token."""

    model: ModelConfig
    """Must have the student's tokenizer."""
    tags: tuple[str, ...] = Field(default=("default",), min_length=1)
    """Samples, or rows, with one of these tags are this teacher's."""


class InferRole(Config):
    """A role that generates."""

    pool: str
    """Name of a pool; one replica per `strategy.tp` devices (vLLM: times `strategy.pp`)."""
    strategy: EngineConfig = VllmConfig()
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the engine's weights; left out: the model's."""

    @property
    def devices_per_worker(self) -> int:
        return self.strategy.processes

    @property
    def capacity(self) -> int:
        """Sequences that one replica decodes at once."""
        return self.strategy.max_num_seqs
