"""Ends of agents: their rewards and numbers."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping
from typing import Any

from roll.core.errors import EnvironmentFailedError, RollError
from roll.core.threads.user_errors import described
from roll.envs.answers import finite_of
from roll.envs.api import finite
from roll.envs.observed import Observed


def observed_end(name: str, ended: asyncio.Future[Any], calls: Mapping[str, int]) -> Observed:
    """Return the end of an episode, with the reward that the agent reports.

    Args:
        name: name of the environment in the config.
        ended: result of the agent, which has ended.
        calls: numbers of calls of tools in the episode.

    Raises:
        EnvironmentFailedError: the agent raised an exception, or reports no finite reward.
    """
    try:
        value = ended.result()
    except RollError:
        raise
    except (Exception, asyncio.CancelledError) as error:
        raise EnvironmentFailedError(
            f"environment {name!r}: the agent raised {described(error)}"
        ) from error
    try:
        reward, numbers = _read_end(value)
    except Exception as error:  # noqa: BLE001  # methods of the agent's objects run here
        told = error if isinstance(error, ValueError) else described(error)
        raise EnvironmentFailedError(
            f"environment {name!r}: the agent must return a finite number, or a dict with "
            f"`reward`; {told}"
        ) from None
    return Observed(array("i"), "", reward=reward, terminated=True, info=_rated(calls) | numbers)


def _rated(calls: Mapping[str, int]) -> dict[str, float]:
    """Return the numbers of calls, and the share of malformed ones as `malformed_rate`; nothing if
    there are no calls."""
    if not calls["tool_calls"]:
        return {}
    rate = {"malformed_rate": calls["malformed"] / calls["tool_calls"]}
    return {key: float(count) for key, count in calls.items()} | rate


def _read_end(value: Any) -> tuple[float, dict[str, float]]:
    """Return the reward and the further numbers of what an agent returned; ValueError, with what
    was found, if it has no finite reward."""
    info = dict(value) if isinstance(value, Mapping) else {"reward": value}
    reward = finite(info.pop("reward", None))
    if reward is None:
        raise ValueError(f"found {repr(value)[:80]}")
    return reward, finite_of(info)
