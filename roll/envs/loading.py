"""Environments by name: built in, of another package by an adapter, or of users by import path."""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from roll.config.errors import nearest
from roll.config.sections.environment import EnvironmentConfig
from roll.config.user_code.arguments import check_arguments
from roll.config.user_code.import_path import load_object
from roll.core.errors import ConfigError
from roll.core.registry import Registry
from roll.envs.adapters.packages.errors import AdapterError
from roll.envs.adapters.table import (
    ADAPTERS,
    Adapter,
    adapter_of,
    check_adapter,
    paths_of_user,
    spec_of,
)
from roll.envs.agents.api import AgentTask
from roll.envs.api import Env
from roll.envs.built_in.boards.connect_four import ConnectFour
from roll.envs.built_in.boards.frozen_lake import FrozenLake
from roll.envs.built_in.boards.self_play import SelfPlay
from roll.envs.built_in.boards.sliding_puzzle import SlidingPuzzle
from roll.envs.built_in.boards.sokoban import Sokoban
from roll.envs.built_in.boards.tic_tac_toe import TicTacToe
from roll.envs.built_in.code.fix_code import FixCode
from roll.envs.built_in.code.terminal import Terminal
from roll.envs.built_in.numbers.bandit import Bandit
from roll.envs.built_in.numbers.blackjack import Blackjack
from roll.envs.built_in.numbers.calculator import Calculator
from roll.envs.built_in.numbers.countdown import Countdown
from roll.envs.built_in.numbers.guess_number import GuessNumber
from roll.envs.built_in.text.house import TextHouse
from roll.envs.built_in.text.search_qa import SearchQa
from roll.envs.built_in.text.shop import Shop
from roll.envs.processes.env import EnvProcesses
from roll.envs.tools.environment import Tools

ENVS: Registry[Callable[..., Any]] = Registry("environment")
"""Built-in environments by the name that `env` of the config uses."""
ENVS.register("frozen_lake")(FrozenLake)
ENVS.register("sokoban")(Sokoban)
ENVS.register("sliding_puzzle")(SlidingPuzzle)
ENVS.register("tic_tac_toe")(TicTacToe)
ENVS.register("connect_four")(ConnectFour)
ENVS.register("self_play")(SelfPlay)
ENVS.register("guess_number")(GuessNumber)
ENVS.register("countdown")(Countdown)
ENVS.register("calculator")(Calculator)
ENVS.register("bandit")(Bandit)
ENVS.register("blackjack")(Blackjack)
ENVS.register("shop")(Shop)
ENVS.register("search_qa")(SearchQa)
ENVS.register("house")(TextHouse)
ENVS.register("fix_code")(FixCode)
ENVS.register("terminal")(Terminal)
ENVS.register("tools")(Tools)


def load_agent(name: str, agent: str, kwargs: Mapping[str, Any]) -> Callable[[AgentTask], Any]:
    """Return the function that runs an agent, with its keyword arguments.

    Raises:
        ConfigError: there is no such function, or it does not take a task and these arguments.
    """
    where = f"environments.{name}"
    run: Callable[..., Any] = load_object(agent)
    if not callable(run):
        raise ConfigError(f"{where}.agent: {agent} is a {type(run).__name__}; expected a function")
    check_arguments(run, 1, kwargs, where=f"{where}.kwargs", what=agent)
    if not kwargs:
        return run
    if inspect.iscoroutinefunction(run):

        async def bound(task: AgentTask) -> Any:
            return await run(task, **kwargs)

        return bound
    return partial(run, **kwargs)


def load_env(name: str, config: EnvironmentConfig) -> Callable[[], Env]:
    """Return a function that makes the environment of one episode.

    Args:
        name: name of the environment in the config, for messages.
        config: its settings; `env` names one in `ENVS`, one of an adapter (`prefix:name`), or the
            import path `package.module:Class` of a class or function.

    Raises:
        ConfigError: the environment does not exist, or does not take these arguments.
    """
    where = f"environments.{name}"
    check_env(where, config)
    found = adapter_of(config.what)
    process = in_process(config)
    if found is not None:
        adapter, adapted = found
        if process:
            return _processes(name, config, spec_of(adapter, adapted, config))
        return _prepared(where, adapter, adapted, config)
    make = made_here(where, config.what, config.kwargs) if config.python is None else None
    if not process:
        assert make is not None
        return make
    path = config.what
    if path in ENVS:
        path = f"{ENVS[path].__module__}:{ENVS[path].__qualname__}"
    spec = {"object": path, "args": [], "kwargs": dict(config.kwargs), "paths": paths_of_user()}
    return _processes(name, config, spec)


def in_process(config: EnvironmentConfig) -> bool:
    """Return whether each episode has a process of its own."""
    if config.process is not None:
        return config.process
    found = adapter_of(config.what)
    return config.python is not None or (found is not None and found[0].process)


def check_env(where: str, config: EnvironmentConfig) -> None:
    """Raise ConfigError for settings that certainly cannot work; import nothing of the user's.

    Args:
        where: key of the environment in the config.
        config: its settings.
    """
    if config.python is not None:
        if _interpreter(config.python) is None:
            raise ConfigError(f"{where}.python: {config.python} is no program; name an interpreter")
        if config.what in ENVS:
            raise ConfigError(
                f"{where}.python: {config.what} is built in, which other interpreters do not have; "
                "drop `python`"
            )
    if config.changed("memory_gb") and not in_process(config):
        raise ConfigError(
            f"{where}.memory_gb: limits the process of an episode, and episodes of {config.what} "
            "have none of their own; set process: true, or drop it (max_memory_gb limits a worker)"
        )
    if adapter_of(config.what) is not None:
        check_adapter(where, config)
    elif config.adapter:
        raise ConfigError(
            f"{where}.adapter: {config.what} has no adapter; drop it (adapters: "
            f"{', '.join(ADAPTERS)})"
        )


def _processes(name: str, config: EnvironmentConfig, spec: Mapping[str, Any]) -> Callable[[], Any]:
    """Return the function that makes an environment in a process of its own.

    The template of these processes starts at once; ConfigError if it cannot import the environment.
    """
    python = sys.executable if config.python is None else str(_interpreter(config.python))
    limit = None if config.memory_gb is None else int(config.memory_gb * 2**30)
    return EnvProcesses(name, python, spec, memory_bytes=limit)


def _interpreter(python: str) -> Path | None:
    """Return the absolute path of a program; None if there is none. A link to it is not followed:
    the interpreter of a virtual environment is such a link."""
    found = shutil.which(Path(python).expanduser())
    return None if found is None else Path(found).absolute()


def _prepared(
    where: str, adapter: Adapter, name: str, config: EnvironmentConfig
) -> Callable[[], Env]:
    """Return the function that makes an adapted environment in this process.

    ConfigError if the adapter or its package refuses the name or the arguments.
    """
    try:
        make: Callable[[], Env] = adapter.import_module().prepare(
            name, dict(config.kwargs), **config.adapter
        )
    except AdapterError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:  # what the package itself raises
        raise ConfigError(f"{where}: {config.what}: {type(error).__name__}: {error}") from error
    return make


def made_here(where: str, env: str, kwargs: Mapping[str, Any]) -> Callable[[], Env]:
    """Return the function that makes an environment which is built in or of the user.

    ConfigError if there is none, or if it does not take `kwargs` or lacks a method.
    """
    if ":" in env:
        make: Callable[..., Env] = load_object(env)
    elif env in ENVS:
        make = ENVS[env]
    else:
        raise ConfigError(
            f"{where}.env: unknown environment {env!r}{nearest(env, ENVS)} (built in: "
            f"{', '.join(ENVS)}; one of your own reads 'package.module:Class'; adapters: "
            f"{', '.join(ADAPTERS)})"
        )
    if not callable(make):
        raise ConfigError(
            f"{where}.env: {env} is a {type(make).__name__}; expected a class, or a function that "
            "makes an environment"
        )
    check_arguments(make, 0, kwargs, where=f"{where}.kwargs", what=env)
    for method in ("reset", "step", "close"):
        if inspect.isclass(make) and not callable(getattr(make, method, None)):
            raise ConfigError(f"{where}.env: {env} has no method `{method}`; see roll/envs/api.py")
    return partial(make, **kwargs)
