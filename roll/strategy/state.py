"""What checkpoints of all training backends have in common: identity and random states."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roll.core.errors import CheckpointError

FORMAT = 1


def check_identity(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """
    Args:
        found: `model_type` and the shapes of `tensors`, as the checkpoint says.
        expected: those of the model that is to be loaded.

    Raises:
        CheckpointError: they differ; says in what.
    """

    def fail(what: str) -> None:
        raise CheckpointError(
            f"checkpoint {path} belongs to another model: {what}; set `model.path` to the model "
            "it was trained from, or `resume: never`"
        )

    if found["format"] != FORMAT:
        raise CheckpointError(f"checkpoint {path} has format {found['format']}; expected {FORMAT}")
    if found["model_type"] != expected["model_type"]:
        fail(f"it has model type {found['model_type']!r}, this run {expected['model_type']!r}")
    theirs, ours = found["tensors"], expected["tensors"]
    for name in [*ours, *theirs]:
        if name not in theirs:
            fail(f"it has no {name!r}")
        if name not in ours:
            fail(f"it has {name!r}, this run's model does not")
        if theirs[name] != ours[name]:
            fail(f"its {name!r} has shape {theirs[name]}, this run's {ours[name]}")


def rng_states() -> dict[str, Any]:
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])
