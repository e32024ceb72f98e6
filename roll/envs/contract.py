"""Check of the rules that every environment must follow, for users to call from their own tests.

from my_envs import GuessTheNumber
from roll.envs.contract import check_env

def test_my_environment_keeps_the_contract():
    check_env(GuessTheNumber, kwargs={"most": 50}, reward_range=(0.0, 1.0))
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from roll.envs.api import Env
from roll.envs.trial import EnvTrial, Policy, Trial


def check_env(
    env: Callable[..., Env],
    *,
    kwargs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> EnvTrial:
    """Raise AssertionError, which says how, if an environment breaks one of the rules.

    The rules: the same seed and actions give the same answers, also while other episodes run; no
    action makes it raise; observations, rewards and `info` are of the form that `Env` asks for;
    an episode can be closed at any time, once.

    Args:
        env: class of the environment, or function that makes one.
        kwargs: keyword arguments for it, as in the config.
        settings: keyword arguments of `try_env`.

    Returns:
        The episodes that were played.
    """
    trial = try_env(partial(env, **(kwargs or {})), **settings)
    if trial.broken:
        raise AssertionError("\n".join(trial.broken))
    return trial


def try_env(
    make: Callable[[], Env],
    *,
    seeds: Iterable[int] = range(5),
    options: Mapping[str, Any] | None = None,
    max_turns: int = 16,
    actions: Sequence[str] = (),
    solver: Callable[[], Policy] | None = None,
    reward_range: tuple[float, float] | None = None,
    timeout_s: float = 30.0,
) -> EnvTrial:
    """Play an environment with policies that know nothing, and report what rules it breaks.

    Must not be called from a running event loop.

    Args:
        make: function that makes the environment of one episode.
        seeds: seeds of the tasks.
        options: columns of a data row that `reset` gets.
        max_turns: number of turns after which an episode is left.
        actions: actions to try besides the hostile ones. The random policy writes one of them, or a
            few words that the environment has said.
        solver: function that returns a policy for one episode; every episode that it plays must end
            with `success` in `info`.
        reward_range: lowest and highest reward that an episode may have.
        timeout_s: time limit of each call of the environment, in seconds.
    """
    trial = Trial(make, dict(options or {}), max_turns, tuple(actions), timeout_s)
    try:
        return asyncio.run(trial.run(tuple(seeds), solver, reward_range))
    finally:
        trial.threads.close()
