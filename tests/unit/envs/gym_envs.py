"""Environments of gymnasium for tests of its adapter."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Told(gymnasium.Env[Any, Any]):
    """Says which action it got; the spaces are arguments."""

    def __init__(self, action_space: Any, observation_space: Any = None, say: Any = None) -> None:
        self.action_space = action_space
        self.observation_space = observation_space or spaces.Text(200)
        self.say = say

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return "begin" if self.say is None else self.say, {"options": str(options)}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        info = {"count": np.int64(3), "array": np.zeros(3)}
        return f"{action!r}" if self.say is None else self.say, np.float32(0.5), False, False, info


def told(space: dict[str, Any], observation: dict[str, Any] | None = None, say: Any = None) -> Told:
    """`Told` with spaces given as {kind: arguments}."""
    return Told(_space(space), None if observation is None else _space(observation), say)


def _space(given: dict[str, Any]) -> Any:
    ((kind, arguments),) = given.items()
    if kind == "Tuple":
        return spaces.Tuple([_space(each) for each in arguments])
    if kind == "Dict":
        return spaces.Dict({key: _space(each) for key, each in arguments.items()})
    return getattr(spaces, kind)(**arguments)


def several() -> Any:
    return gymnasium.vector.SyncVectorEnv([lambda: Told(spaces.Discrete(2))] * 2)


class Shouting(gymnasium.ObservationWrapper[Any, Any, Any]):
    def observation(self, observation: Any) -> Any:
        return str(observation).upper()


class Worded(gymnasium.ActionWrapper[Any, Any, Any]):
    """Takes the first letter of a direction of FrozenLake."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.action_space = spaces.Text(5)

    def action(self, action: Any) -> Any:
        return "ldru".index(action[0])


class Halved(gymnasium.ActionWrapper[Any, Any, Any]):
    """Takes the first two actions alone."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.action_space = spaces.Discrete(2)

    def action(self, action: Any) -> Any:
        return action
