"""Settings that every backend gets, in addition to the settings of its own kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from roll.config.sections.model import LoraConfig, ModelConfig
from roll.config.sections.optimizers.backends import optimizer_problem
from roll.config.sections.optimizers.kinds import AdamWConfig, OptimizerConfig
from roll.core.errors import ConfigError
from roll.core.types import WorkerSpec
from roll.strategy.training.heads import Head

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """Settings of an inference engine."""

    spec: WorkerSpec
    """Place of the engine's replica in the cluster."""
    model: ModelConfig
    dtype: str
    """Dtype of weights and activations: `float32` or `bfloat16`."""
    max_model_len: int
    """Maximum length of prompt plus response, in tokens. If the config of the engine sets
    `max_model_len`, the engine uses its own value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetup(Generic[T]):
    """Settings of a backend that trains or scores. `T` is the type of its forward pass's result."""

    spec: WorkerSpec
    """Rank of this worker. A backend with several ranks joins the process group at
    `spec.rendezvous`, unless this process is in a process group already."""
    model: ModelConfig
    head: Head[T]
    """Loader of the model with a policy, value or score head."""
    max_tokens_per_microbatch: int
    """Maximum number of tokens in one forward (and backward) pass, padding included."""
    packing: bool = False
    """True if the sequences of a micro-batch are joined into one row without padding."""
    optimizer: OptimizerConfig | None = None
    """Settings of the optimizer; None if the model is frozen."""
    keeps_reference: bool = False
    """True to keep a copy of the trained weights that follows them, as the reference."""
    total_steps: int | None = None
    """Number of optimizer steps of the whole run. Required if the learning rate decays."""


def require_trainable(update: U | None) -> U:
    """Return a backend's update, its optimizer with all that belongs to it.

    Raises:
        ConfigError: None, so the model is frozen.
    """
    if update is None:
        raise ConfigError("this model is frozen: it was built without an optimizer")
    return update


def require_adamw(backend: str, optimizer: OptimizerConfig) -> AdamWConfig:
    """Return the settings of the optimizer of a backend that trains with AdamW only.

    Raises:
        ConfigError: they are of another kind.
    """
    if not isinstance(optimizer, AdamWConfig):
        raise ConfigError(f"optimizer.kind: {optimizer_problem(backend, optimizer)}")
    return optimizer


def require_adapter(model: ModelConfig) -> LoraConfig:
    """Return the settings of a model's adapter.

    Raises:
        ConfigError: the model has no adapter.
    """
    if model.lora is None:
        raise ConfigError("this model has no adapter: its base is itself; add model.lora")
    return model.lora
