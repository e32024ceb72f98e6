"""Settings of optimizer, schedule, batch sizes, and roles that hold a model."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from roll.config.algorithm.losses import ValueLossConfig
from roll.config.base import Config
from roll.config.sections.model import ModelConfig
from roll.config.sections.placement import WorkersConfig
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
    """Decoupled weight decay; applied to matrices only, never to norms and biases."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay rates of the running means of the gradient and of its square."""
    eps: float = Field(default=1e-8, gt=0)
    """Number added to the root of the mean square before the division."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Largest global norm of the gradients; larger gradients are scaled down to it."""
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "constant"
    """Learning rate after the warm-up. `constant`: the peak. `linear`, `cosine`: decayed to
    `min_lr_ratio` of the peak at the last step. `inverse_sqrt`: falls as one over the root of the
    number of steps, warm-up included (arXiv 1706.03762). `wsd`: the peak, and in the last
    `decay_ratio` of the steps a linear decay (warm-up, stable, decay; arXiv 2404.06395)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps in which the learning rate rises linearly from zero."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Share of the run's steps that are warm-up, rounded up; in place of `warmup_steps`."""
    decay_ratio: float = Field(default=0.1, gt=0, lt=1)
    """Share of the run's steps in which `wsd` decays, rounded up."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the peak learning rate that is left at the last step; `inverse_sqrt` stays there if
    it reaches it earlier."""

    def warmup(self, total_steps: int | None) -> int:
        """Return the number of steps of the warm-up in a run of `total_steps`.

        Raises:
            ValueError: the warm-up is a share of the run's steps, and `total_steps` is None.
        """
        if not self.warmup_ratio:
            return self.warmup_steps
        if total_steps is None:
            raise ValueError("warmup_ratio needs the total number of optimizer steps")
        return _rounded_up(self.warmup_ratio * total_steps)

    def decay(self, total_steps: int) -> int:
        """Return the number of steps in which `wsd` decays in a run of `total_steps`: all but the
        first at most."""
        return min(_rounded_up(self.decay_ratio * total_steps), total_steps - 1)


def _rounded_up(steps: float) -> int:
    """Return the next whole number of steps. 0.07 of 100 is 7, though its product in binary is
    slightly more."""
    return math.ceil(round(steps, 6))


class LearnerRole(WorkersConfig):
    """Role that trains a model."""

    pool: str
    """Name of a pool; one worker runs on each device."""
    strategy: TrainStrategyConfig = Fsdp2Config()
    """Backend that trains."""
    model: ModelConfig | None = None
    """Model of this role. If left out: the top-level `model`."""
    optimizer: OptimizerConfig = OptimizerConfig()
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
    `strategy.pp`)."""
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
