"""Environments of SkyRL Gym: `skyrl_gym:ID`, or `skyrl_gym:my_module:Class` for one without ID.

They begin with the prompt of a data row; its other columns are their `extras`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from .errors import AdapterError


def prepare(name: str, kwargs: Mapping[str, Any]) -> Callable[[], SkyRLGymEnv]:
    """Return the function that makes the environment of one episode.

    Args:
        name: ID of the environment, or import path of its class.
        kwargs: `env_config` of the environment.

    Raises:
        AdapterError: there is no such environment.
    """
    import skyrl_gym
    from skyrl_gym.envs.registration import registry

    if ":" in name:
        module, _, attribute = name.partition(":")
        made = getattr(importlib.import_module(module), attribute)
        return lambda: SkyRLGymEnv(made, kwargs)
    if name not in registry:
        raise AdapterError(f"SkyRL Gym has no {name!r} (it has {', '.join(registry)})")
    return lambda: SkyRLGymEnv(lambda **given: skyrl_gym.make(name, **given), kwargs)


class SkyRLGymEnv:
    """Environment of SkyRL Gym; it is made when its row is known."""

    def __init__(self, make: Callable[..., Any], config: Mapping[str, Any]) -> None:
        """Keep the function that makes the environment, and its `env_config`."""
        self._make = make
        self._config = dict(config)
        self._env: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """Begin the episode of a data row.

        Args:
            seed: passed on as a column.
            options: columns of the row. `prompt`, a text or messages, begins the episode; the
                others are its `extras`. `answer` becomes the `reward_spec` if the row has none.

        Raises:
            ValueError: the row has no `prompt`.
        """
        extras = dict(options or {})
        prompt = extras.pop("prompt", None)
        if prompt is None:
            raise ValueError(
                "the task has no prompt; SkyRL Gym plays rows (sources: path), no seeds"
            )
        if "answer" in extras and "reward_spec" not in extras:
            extras["reward_spec"] = {"method": "rule", "ground_truth": extras["answer"]}
        extras.setdefault("extra_info", {})
        extras["seed"] = seed
        self._env = self._make(env_config=self._config, extras=extras)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        said, info = self._env.init(messages)
        return list(said), dict(info)

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        out = self._env.step(action)
        done = bool(out["done"])
        info = {**(out.get("metadata") or {}), **self._env.get_metrics()}
        return list(out["observations"]), float(out["reward"]), done, False, info

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
