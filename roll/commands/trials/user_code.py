"""Trial of the code that a run file names: it is imported, and compared with what the file gives
to it. None of it is called.

The trial runs in its own process, so everything that the code imports, opens or breaks is gone
afterwards, and an import that hangs is killed.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from roll.config.agentic_base import AgenticBase
from roll.config.errors import ConfigError, UserError
from roll.config.rlvr_base import RlvrBase
from roll.config.run import RunConfig
from roll.config.sections.environment import EnvironmentConfig
from roll.config.sections.lifecycle import SERVICES, TrackerConfig
from roll.config.sections.reward import RewardConfig
from roll.config.sections.rollout import CustomFilterConfig
from roll.config.user_code.arguments import check_arguments
from roll.config.user_code.classes import signature_of, stands_in
from roll.config.user_code.own import imported
from roll.distributed.device_layout import address_to_join
from roll.distributed.on_ray.environment import replace_environment
from roll.envs.adapters.table import adapter_of
from roll.rewards.execution.child import (
    START_TIMEOUT_S,
    Child,
    ChildDiedError,
    ChildRaisedError,
    ChildSpec,
    ChildTimeoutError,
)

Named = tuple[str, str, Any]
"""Key of a place in the run file that names code, the import path, and the settings there: those of
a tracker, reward, environment or filter; None of a function for rows."""


def wrong_code(config: RunConfig, folder: Path) -> list[UserError]:
    """Return what is wrong with trackers, filters, rewards, environments and functions for rows
    that the user brought: imports that fail, and arguments that they do not take. Rewards and
    environments of a run on other machines, which import them, are not looked at.

    Args:
        folder: folder of the user's modules.
    """
    named = [*_in_driver(config)]
    if address_to_join(config.cluster) is None:
        named += _in_workers(config)
    if not named:
        return []
    child = Child(ChildSpec("roll.commands.trials.user_code:make_look", (str(folder),)))
    wrong: list[UserError] = []
    try:
        for key, path, settings in named:
            try:
                found = child.call((key, path, settings), START_TIMEOUT_S)
            except ChildTimeoutError:
                limit = f"{START_TIMEOUT_S:g} s"
                found = [f"{key}: {path.partition(':')[0]} was not imported within {limit}"]
            except (ChildRaisedError, ChildDiedError, OSError) as error:
                found = [f"{key}: importing {path.partition(':')[0]} failed\n{error}"]
            wrong += map(ConfigError, found)
    finally:
        child.close()
    return wrong


def _in_driver(config: RunConfig) -> Iterator[Named]:
    """Yield the code that the driver of a run imports."""
    for i, tracker in enumerate(config.track.trackers):
        if tracker.kind not in SERVICES:
            yield f"track.trackers.{i}", tracker.kind, tracker
    for source in config.sources:
        if source.fn is not None:
            yield f"{source.path}: fn", source.fn, None
    if isinstance(config, RlvrBase) and config.generates:
        for key, choices in config.filters.items():
            for i, choice in enumerate(choices):
                if isinstance(choice, CustomFilterConfig):
                    yield f"{key}.{i}", choice.fn, choice


def _in_workers(config: RunConfig) -> Iterator[Named]:
    """Yield the code that workers import in the interpreter of the run."""
    if not isinstance(config, RlvrBase) or not config.generates:
        return
    for name, reward in config.rewards.items():
        path = reward.fn or reward.worker
        if path is not None and ":" in path:
            yield f"rewards.{name}", path, reward
    if isinstance(config, AgenticBase):
        for name, environment in config.environments.items():
            path = environment.agent or environment.what
            if ":" in path and adapter_of(path) is None and environment.python is None:
                yield f"environments.{name}", path, environment


def make_look(folder: str) -> Callable[[Named], list[str]]:
    """Return the function that looks at the code of one place, and returns what is wrong with it;
    called in the child process. `folder` goes first on `sys.path`."""
    sys.path.insert(0, folder)

    def look(named: Named) -> list[str]:
        found: list[str] = []
        try:
            found.extend(_looked_at(*named))
        except ConfigError as error:
            found.append(str(error))
        return found

    return look


def _looked_at(key: str, path: str, settings: Any) -> Iterator[str]:
    """Yield what is wrong with the code of a place, as lines; or raise ConfigError with it."""
    if isinstance(settings, RewardConfig):
        replace_environment({**os.environ, **settings.env})
    try:
        found = imported(path)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    name = key.partition(".")[2]
    match settings:
        case TrackerConfig():
            yield from _wrong_tracker(key, found, settings)
        case RewardConfig():
            _check_reward(name, settings)
        case EnvironmentConfig():
            _check_environment(name, settings)
        case CustomFilterConfig():
            from roll.rollout.filters import custom_filter

            custom_filter(settings.fn, settings.kwargs, key=key)
        case None:
            if not callable(found):
                raise ConfigError(f"{key}: {path} is no function but {type(found).__name__}")
            check_arguments(found, 1, {}, where=key, what=path)


def _wrong_tracker(key: str, found: Any, settings: TrackerConfig) -> Iterator[str]:
    """Yield in which way an object makes no trackers, or raise ConfigError with it; none is made,
    because it may write somewhere."""
    from roll.output_dir.trackers.interface import Tracker

    kind = settings.kind
    if not callable(found):
        yield f"{key}.kind: {kind} is neither a class nor a function"
        return
    check_arguments(found, 1, settings.kwargs, where=f"{key}.kwargs", what=kind)
    if not inspect.isclass(found):
        return  # a function that makes one: only then it is known
    for name, wanted in (("log", Tracker.log), ("close", Tracker.close)):
        given = inspect.getattr_static(found, name, None)
        if inspect.isfunction(given) and not stands_in(given, wanted):
            has = f"{signature_of(name, given)}; expected {signature_of(name, wanted)}"
            yield f"{key}.kind: {kind} has {has}"
        elif not callable(getattr(found, name, None)):
            yield f"{key}.kind: {kind} is no tracker: it has no method {signature_of(name, wanted)}"


def _check_reward(name: str, settings: RewardConfig) -> None:
    """Raise ConfigError unless a reward takes a sample and its arguments."""
    if settings.fn is not None:
        from roll.rewards.api import RewardContext
        from roll.rewards.loading import load_reward

        load_reward(settings.fn, settings.kwargs, RewardContext(name, seed=0))
    else:
        from roll.workers.reward_classes import reward_worker_class

        reward_worker_class(name, settings)


def _check_environment(name: str, settings: EnvironmentConfig) -> None:
    """Raise ConfigError unless an environment, or an agent, takes its arguments."""
    from roll.envs.loading import load_agent, made_here

    if settings.agent is not None:
        load_agent(name, settings.agent, settings.kwargs)
    else:
        made_here(f"environments.{name}", settings.what, settings.kwargs)
