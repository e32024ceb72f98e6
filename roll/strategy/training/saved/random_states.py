"""The random states of a process as plain JSON. Pickles could run code when they are loaded."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_states() -> dict[str, Any]:
    """Return the random states of PyTorch, Python, NumPy and, if CUDA is in use, the GPU."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": _to_text(torch.get_rng_state()),
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }
    if torch.cuda.is_initialized():
        states["cuda"] = _to_text(torch.cuda.get_rng_state())
    return states


def read_random_states(text: str) -> dict[str, Any]:
    """Convert the JSON text of `random_states` to the argument of `set_random_states`.

    Raises:
        ValueError, KeyError, TypeError: the text is something else.
    """
    states = json.loads(text)
    version, words, gauss = states["python"]
    kind, keys, position, has_gauss, cached = states["numpy"]
    found = {
        "torch": _to_tensor(states["torch"]),
        "python": (version, tuple(words), gauss),
        "numpy": (kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached),
    }
    return found | ({"cuda": _to_tensor(states["cuda"])} if "cuda" in states else {})


def set_random_states(states: dict[str, Any] | None) -> None:
    """Set the random states of this process.

    Args:
        states: from `read_random_states`. None changes nothing: the run that saved the checkpoint
            did not have this rank, so the rank keeps its own states.
    """
    if states is None:
        return
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])


def _to_text(state: Tensor) -> str:
    """Encode a random state of PyTorch, a tensor of bytes, as base64."""
    return base64.b64encode(state.numpy().tobytes()).decode()


def _to_tensor(text: str) -> Tensor:
    """Decode the base64 text of `_to_text` into a random state of PyTorch."""
    data = base64.b64decode(text, validate=True)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
