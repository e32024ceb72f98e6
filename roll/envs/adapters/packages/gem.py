"""Environments of GEM: `gem:ID`, such as `gem:game:GuessTheNumber-v0-easy`. They have the signature
of gymnasium, and talk text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .errors import AdapterError


def prepare(name: str, kwargs: Mapping[str, Any], suffix: bool = True) -> Callable[[], GemEnv]:
    """Return the function that makes the environment of one episode.

    Args:
        name: ID of the environment.
        kwargs: keyword arguments for `gem.make`.
        suffix: put what GEM asks for after an observation (`info["suffix"]`, such as "Enter your
            next guess.") behind it, as GEM's own wrappers do.

    Raises:
        AdapterError: there is no such environment.
    """
    import gem
    import gem.envs
    from gem.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        kind = name.split("-")[0].lower()
        like = [known for known in ENV_REGISTRY if known.lower().startswith(kind)]
        raise AdapterError(f"GEM has no {name!r} (it has {', '.join(like or ENV_REGISTRY)})")
    return lambda: GemEnv(gem.make(name, **kwargs), suffix)


class GemEnv:
    """Environment of GEM."""

    def __init__(self, env: Any, suffix: bool) -> None:
        """Wrap an environment of GEM; for `suffix` see `prepare`."""
        self._env = env
        self._suffix = suffix

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin the episode as `seed` says; `options` are ignored, because GEM takes no rows."""
        observation, info = self._env.reset(seed=seed)
        return self._text(observation, info), dict(info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self._env.step(action)
        text = self._text(observation, info)
        return text, float(reward), bool(terminated), bool(truncated), dict(info)

    def close(self) -> None:
        """Close the environment if it has a `close`; GEM asks for none."""
        close = getattr(self._env, "close", None)
        if close is not None:
            close()

    def _text(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return an observation with what GEM asks for behind it."""
        suffix = info.get("suffix", "") if self._suffix else ""
        return f"{observation}\n{suffix}" if suffix else str(observation)
