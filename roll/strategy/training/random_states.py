"""The random states of a process, as plain JSON: a checkpoint holds no pickles."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_states() -> dict[str, Any]:
    """Of PyTorch, Python and NumPy; of the GPU too, where one is used."""
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
    """What `set_random_states` takes, from the JSON of what `random_states` gave.

    Raises:
        ValueError, KeyError, TypeError: it is something else.
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
    """None: a rank that the saving run did not have keeps its own."""
    if states is None:
        return
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])


def _to_text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _to_tensor(text: str) -> Tensor:
    data = base64.b64decode(text, validate=True)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
