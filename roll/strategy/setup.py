"""What every backend is told of its place in a run, whatever its own settings are."""

from __future__ import annotations

from dataclasses import dataclass

from roll.config.model import ModelConfig
from roll.core.types import WorkerSpec


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
