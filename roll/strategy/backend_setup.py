"""What every backend is told of its place in a run, whatever its own settings are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from roll.config.sections.model import ModelConfig
from roll.config.sections.training import OptimizerConfig
from roll.core.types import WorkerSpec
from roll.strategy.training.heads import Head

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """Of an engine."""

    spec: WorkerSpec
    """Its replica."""
    model: ModelConfig
    dtype: str
    """Of weights and activations, `float32` or `bfloat16`."""
    max_model_len: int
    """Longest prompt plus response, in tokens; an engine's own `max_model_len` goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetup(Generic[T]):
    """Of a backend that trains or scores; T is what its forward passes give."""

    spec: WorkerSpec
    """Its rank; a backend with several joins the process group at `spec.rendezvous` unless one
    exists."""
    model: ModelConfig
    head: Head[T]
    """What the model's last layer is for."""
    max_tokens_per_microbatch: int
    """Of one forward, and backward, pass, padding included."""
    packing: bool = False
    """Micro-batches are rows without padding."""
    optimizer: OptimizerConfig | None = None
    """None: the model is frozen."""
    total_steps: int | None = None
    """Optimizer steps of the whole run; needed by decaying schedules."""
