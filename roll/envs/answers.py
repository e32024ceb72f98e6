"""Answers of environments: their form, and what their `info` says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from roll.core.step_rewards import require_reward
from roll.envs.api import finite

NEW_CONTEXT = "new_context"
"""Key of `info` with which an environment lets the policy forget what was said before."""


def unpacked(answer: Any, form: str, size: int) -> tuple[Any, ...]:
    """Return an answer of `size` items whose last one is `info`; TypeError, with `form` as what was
    expected, for anything else."""
    if not isinstance(answer, tuple | list) or len(answer) != size:
        raise TypeError(f"expected {form}, found {type(answer).__name__} {repr(answer)[:60]}")
    if not isinstance(answer[-1], Mapping):
        raise TypeError(f"`info` must be a dict, found {type(answer[-1]).__name__}")
    return tuple(answer)


def reward_of(reward: Any) -> float:
    """Return the reward of a turn; ValueError if it is no finite number, or one with which a step
    cannot compute."""
    try:
        value = float(reward)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"the reward must be a finite number, found {short(reward)}")
    return require_reward(value, "the reward")


def short(value: Any) -> str:
    """Return the beginning of a value's `repr`, or its type if it has none: Python does not write
    an int of more than 4300 digits."""
    try:
        return f"{value!r:.60}"
    except Exception:  # noqa: BLE001  # `__repr__` may be the user's
        return f"{type(value).__name__} that cannot be shown"


def numbers_of(info: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers and bools of `info`, for metrics."""
    return finite_of({k: v for k, v in info.items() if k not in ("state", "seat", NEW_CONTEXT)})


def finite_of(values: Mapping[Any, Any]) -> dict[str, float]:
    """Return the finite numbers and bools of a mapping, for metrics. That under `mean` gets the
    name `info_mean`, since the mean of the rewards has the other."""
    named = ("info_mean" if key == "mean" else str(key) for key in values)
    numbers = zip(named, map(finite, values.values()), strict=True)
    return {name: number for name, number in numbers if number is not None}


def state_of(info: Mapping[str, Any]) -> str:
    """Return the name of the state in `info`; empty if there is none."""
    state = info.get("state")
    return "" if state is None else str(state)
