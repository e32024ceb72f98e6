"""Environments of gymnasium: `gymnasium:ID`, or `gymnasium:my_module:Class` for one without ID.

The policy reads observations as text and writes actions as text (`spaces.py`). A turn without an
action is counted and answered; the environment does not see it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from .errors import AdapterError
from .spaces import Actions, InvalidActionError, actions_of, check_observations, shown

NAMES = {
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "MountainCar": ("left", "none", "right"),
    "Acrobot": ("left", "none", "right"),
    "LunarLander": ("none", "left", "main", "right"),
}
"""Names of the actions of gymnasium's own environments, as its documentation has them."""
MARKED = re.compile(r"\x1b\[\d+(?:;\d+)*m(.*?)\x1b\[0m", re.DOTALL)
"""Field that `ansi` rendering colours, such as that of the player."""


def prepare(
    name: str,
    kwargs: Mapping[str, Any],
    actions: Sequence[str] | None = None,
    pattern: str | None = None,
    show: str | None = None,
    instructions: str | None = None,
    invalid_reward: float = 0.0,
    wrappers: Sequence[str | Mapping[str, Any]] = (),
) -> Callable[[], GymnasiumEnv]:
    """Return the function that makes the environment of one episode; one is made to look at it.

    Args:
        name: ID of the environment, also `my_module:ID`; or `my_module:Class`.
        kwargs: keyword arguments for it.
        actions: names of the actions of a Discrete space, in order. By default numbers, and for
            gymnasium's own environments the names of its documentation.
        pattern: regular expression with one group that holds the action; its last match counts.
        show: what the policy reads: `ansi`, the picture of the environment as text; `value`, the
            observation; `both`. By default `ansi` where the environment has it.
        instructions: first sentences; by default what an action looks like. An empty text for none.
        invalid_reward: reward of a turn without an action.
        wrappers: import paths of wrappers, from the inside out, or `{path: ..., kwargs: {...}}`.

    Raises:
        AdapterError: there is no such environment, or text is no use for it.
    """
    import gymnasium

    if show not in (None, "ansi", "value", "both"):
        raise AdapterError(f"adapter.show: found {show!r}; expected ansi, value or both")
    if "num_envs" in kwargs or "vectorization_mode" in kwargs:
        raise AdapterError(_no_vector("kwargs"))
    kwargs = dict(kwargs)
    picture = "render_mode" not in kwargs and show != "value" and _draws_text(gymnasium, name)
    if picture:
        kwargs["render_mode"] = "ansi"
    elif show in ("ansi", "both") and kwargs.get("render_mode") != "ansi":
        raise AdapterError(f"adapter.show: {name} has no render_mode ansi")
    make = partial(_made, gymnasium, name, kwargs, wrappers)
    first = make()
    try:
        names = actions if actions is not None else _names(first)
        check_observations(first.observation_space)
        array = importlib.import_module("numpy").array
        read = actions_of(first.action_space, names, pattern, array)
        text = f"Answer with {read.wanted}." if instructions is None else instructions
        how = show or ("ansi" if first.render_mode == "ansi" else "value")
    finally:
        first.close()
    return lambda: GymnasiumEnv(make(), read, how, text, invalid_reward)


class GymnasiumEnv:
    """Environment of gymnasium that talks text."""

    def __init__(
        self, env: Any, actions: Actions, show: str, instructions: str, invalid_reward: float
    ) -> None:
        """Wrap an environment of gymnasium.

        Args:
            env: the environment.
            actions: actions of its space.
            show: `ansi`, `value` or `both`, see `prepare`.
            instructions: first sentences; empty for none.
            invalid_reward: reward of a turn without an action.
        """
        self._env = env
        self._actions = actions
        self._show = show
        self._instructions = instructions
        self._invalid_reward = invalid_reward
        self._invalid = 0
        self._seen = ""
        """What the policy saw last, without instructions and complaints."""
        self._info: dict[str, Any] = {}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin the episode; `options` go to the environment. For `info` see `step`."""
        observation, info = self._env.reset(seed=seed, options=options or None)
        text = self._look(observation, info)
        return "\n".join(each for each in (self._instructions, text) if each), self._info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the action in a text; a text without one changes nothing and gives `invalid_reward`.

        `info` is that of the environment, with `invalid`, the number of such texts, and `state`,
        the observation as text.
        """
        try:
            chosen = self._actions.read(action)
        except InvalidActionError as error:
            self._invalid += 1
            self._info = {**self._info, "invalid": self._invalid}
            text = f"This is no action. Answer with {error}.\n{self._seen}"
            return text, self._invalid_reward, False, False, self._info
        observation, reward, terminated, truncated, info = self._env.step(chosen)
        text = self._look(observation, info)
        return text, float(reward), bool(terminated), bool(truncated), self._info

    def close(self) -> None:
        self._env.close()

    def _look(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return what the policy reads of an observation; keep it, and `info` for the next
        result."""
        value = shown(observation)
        parts = []
        if self._show in ("ansi", "both"):
            parts.append(_drawn(self._env.render()))
        if self._show in ("value", "both"):
            parts.append(value)
        self._seen = "\n".join(parts)
        self._info = {"state": value, **_scalars(info), "invalid": self._invalid}
        return self._seen


def _made(
    gymnasium: Any,
    name: str,
    kwargs: Mapping[str, Any],
    wrappers: Sequence[str | Mapping[str, Any]],
) -> Any:
    """Return an environment by ID or import path, in its wrappers; AdapterError if there is
    none."""
    try:
        found = _class(name)
        env = gymnasium.make(name, **kwargs) if found is None else found(**kwargs)
    except gymnasium.error.Error as error:
        raise AdapterError(f"gymnasium: {error}") from None
    for each in wrappers:
        path, arguments = _wrapper(each)
        wrapper = _class(path)
        if wrapper is None:
            raise AdapterError(f"adapter.wrappers: there is no {path!r}")
        env = wrapper(env, **arguments)
    if isinstance(env, gymnasium.vector.VectorEnv):
        raise AdapterError(_no_vector(name))
    return env


def _wrapper(entry: str | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return import path and keyword arguments of an entry of `wrappers`; AdapterError if it has
    another form."""
    if isinstance(entry, str):
        return entry, {}
    is_entry = isinstance(entry, Mapping) and "path" in entry and entry.keys() <= {"path", "kwargs"}
    path, arguments = (entry["path"], entry.get("kwargs") or {}) if is_entry else (None, {})
    if not isinstance(path, str) or not isinstance(arguments, Mapping):
        raise AdapterError(
            "adapter.wrappers: expected an import path, or {path: ..., kwargs: {...}}, found "
            f"{entry!r:.80}"
        )
    return path, arguments


def _no_vector(what: str) -> str:
    """Return the message that refuses vector environments, for the key or name `what`."""
    return (
        f"{what}: a vector environment plays several games at once, but an episode is one "
        "conversation; name the single environment, and set data.prompts_per_step and "
        "data.samples_per_prompt for more episodes"
    )


def _class(path: str) -> Any:
    """Return the object at `module:name`; None if it is an ID of gymnasium, or not there.

    The module is imported; ImportError if it is missing.
    """
    module, _, name = path.partition(":")
    if not name.isidentifier():
        return None
    return getattr(importlib.import_module(module), name, None)


def _draws_text(gymnasium: Any, name: str) -> bool:
    """Return whether an environment can render itself as text; AdapterError if there is no such
    ID."""
    found = _class(name)
    if found is None:
        try:
            spec = gymnasium.spec(name.rpartition(":")[2] if _imported(name) else name)
        except gymnasium.error.Error as error:
            raise AdapterError(f"gymnasium: {error}") from None
        entry = spec.entry_point
        found = (
            gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
        )
    return "ansi" in getattr(found, "metadata", {}).get("render_modes", ())


def _imported(name: str) -> bool:
    """Import the module of an ID `my_module:ID`, which registers it; return whether it has one."""
    module, colon, _ = name.partition(":")
    if colon:
        importlib.import_module(module)
    return bool(colon)


def _names(env: Any) -> Sequence[str] | None:
    """Return the names of the actions, in order; None if it is none of gymnasium's own environments
    in `NAMES`, or has other actions there: by an argument (`continuous`) or in a wrapper."""
    entry = "" if env.spec is None else str(env.spec.entry_point)
    if not entry.startswith("gymnasium."):
        return None
    names, space = NAMES.get(env.spec.name), env.action_space
    fits = names is not None and type(space).__name__ == "Discrete" and space.n == len(names)
    return names if fits else None


def _drawn(picture: Any) -> str:
    """Return a picture of characters without colours; coloured fields get brackets."""
    text = picture.getvalue() if hasattr(picture, "getvalue") else str(picture)
    return MARKED.sub(r"[\1]", text).strip("\n")


def _scalars(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return `info` with numbers of numpy as those of Python."""
    found = {}
    for key, value in info.items():
        is_scalar = hasattr(value, "item") and getattr(value, "size", 0) == 1
        found[str(key)] = value.item() if is_scalar else value
    return found
