"""Trial of the tasks and environments of an agentic run, before it starts.

An environment is tried in its own process, on the first task with its tag: it is reset, hears an
empty turn, and is closed.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.commands.trials.result import Trial
from roll.config.agentic_base import AgenticBase
from roll.config.errors import UserError
from roll.config.sections.environment import EnvironmentConfig, TaskSource
from roll.core.errors import ConfigError, DataError, RowError
from roll.core.types import Prompt
from roll.data.sources import resolve_format
from roll.data.tasks import options_of, seed_of, source_tasks
from roll.envs.adapters.table import adapter_of
from roll.envs.api import messages_of
from roll.envs.loading import load_env
from roll.rewards.execution.child import (
    Child,
    ChildDiedError,
    ChildRaisedError,
    ChildSpec,
    ChildTimeoutError,
)

LOOKED_AT = 1000
"""Number of rows that are tried of each file of tasks."""


def try_tasks(config: AgenticBase, folder: Path) -> Trial:
    """Read the first tasks of each source, and try each environment on one of them.

    Args:
        config: the run to try.
        folder: folder of the user's modules, which an environment may name.
    """
    trial = Trial()
    sources = {f"data.sources.{i}": source for i, source in enumerate(config.data.sources)}
    sources |= {f"validation.sets.{name}": each for name, each in config.validation.sets.items()}
    played = {tag for environment in config.environments.values() for tag in environment.tags}
    for key, source in sources.items():
        few = source
        if source.seeds is None and (source.limit is None or source.limit > LOOKED_AT):
            few = source.model_copy(update={"limit": LOOKED_AT})
        try:
            if source.seeds is None and resolve_format(source) == "hub":
                trial.untried.append(f"{key} (on the hub)")
                continue
            tasks = _tasks(key, source, few)
        except UserError as error:
            trial.wrong.append(error)
            continue
        other = next((task.tag for task in tasks if task.tag not in played), None)
        if other is not None:
            known = ", ".join(sorted(played))
            trial.wrong.append(
                ConfigError(f"{key}: no environment takes the tag {other!r} (known: {known})")
            )
        for task in tasks:
            trial.rows.setdefault(task.tag, task)
        if few is source or (source.part is None and len(tasks) < LOOKED_AT):
            trial.counted[key] = len(tasks)
        of = "seeds" if source.seeds is not None else source.path
        trial.told.append(f"{key}: {len(tasks)} tasks of {of}")
    for name, environment in config.environments.items():
        row = next((trial.rows[tag] for tag in environment.tags if tag in trial.rows), None)
        if row is None or environment.agent is not None:
            why = "no task" if row is None else "an agent, which needs a policy"
            trial.untried.append(f"environments.{name} ({why})")
            continue
        try:
            said = _first_words(name, environment, folder, row)
        except UserError as error:
            trial.wrong.append(error)
        else:
            of = packages_told(environment)
            trial.told.append(f"environments.{name}: {of}begins task {row.id} with {said!r:.60}")
    return trial


def _tasks(key: str, source: TaskSource, few: TaskSource) -> Sequence[Prompt]:
    """Return the first tasks of a source, as `few` limits them; all of them if none of these lies
    in its part. Errors are those of `source_tasks`."""
    try:
        return source_tasks(key, few).items
    except DataError as error:
        if source.part is None or isinstance(error, RowError):
            raise
        return source_tasks(key, source).items


def packages_told(environment: EnvironmentConfig) -> str:
    """Return the package of an environment with an adapter and its version, and a comma, for the
    report; empty for environments without an adapter or behind a server."""
    found = adapter_of(environment.what)
    if found is None or found[0].server:
        return ""
    if environment.python is not None:
        return f"{found[0].package} of {environment.python}, "
    return f"{found[0].package} {found[0].version}, "


def _first_words(name: str, environment: EnvironmentConfig, folder: Path, task: Prompt) -> str:
    """Return what an environment says first; ConfigError if it fails."""
    factory = "roll.commands.trials.tasks:make_episode"
    child = Child(ChildSpec(factory, (str(folder), name, environment.model_dump())))
    limit_s = environment.reset_timeout_s + environment.step_timeout_s
    try:
        said = child.call((seed_of(task, run_seed=0), options_of(task)), limit_s)
    except ChildTimeoutError:
        raise ConfigError(
            f"environments.{name}: {environment.what} did not begin task {task.id} within "
            f"{limit_s:g} s; mend it, or raise reset_timeout_s and step_timeout_s"
        ) from None
    except (ChildRaisedError, ChildDiedError, OSError) as error:
        raise ConfigError(
            f"environments.{name}: {environment.what} fails on task {task.id}, for an empty turn; "
            "mend it, or check with --fast if it cannot work on this machine:\n"
            f"{str(error).rstrip()}"
        ) from None
    finally:
        child.close()
    assert isinstance(said, str)
    return said


def make_episode(
    folder: str, name: str, settings: dict[str, Any]
) -> Callable[[tuple[int, Mapping[str, Any]]], str]:
    """Return the function that plays one short episode; called in the child process. `folder` goes
    first on `sys.path`."""
    sys.path.insert(0, folder)
    config = EnvironmentConfig.model_validate(settings)
    make = load_env(name, config)
    loop = asyncio.new_event_loop()  # one for all calls: connections belong to their loop

    def finished(answer: Any) -> Any:
        async def wait() -> Any:
            return await answer

        return loop.run_until_complete(wait()) if inspect.isawaitable(answer) else answer

    def play(task: tuple[int, Mapping[str, Any]]) -> tuple[str, Any]:
        """Reset an environment, do one step with an empty action and close it; return the first
        observation as text, and what the step returned without its `info`."""
        seed, options = task
        env = make()
        said, _ = finished(env.reset(seed=seed, options=dict(options)))
        try:
            answer, reward, terminated, truncated, _ = finished(env.step(""))
            ended = (float(reward), bool(terminated), bool(truncated))
        finally:
            closing: Any = env.close
            finished(closing())
        return "\n".join(message.content for message in messages_of(said)), (answer, *ended)

    def first_words(task: tuple[int, Mapping[str, Any]]) -> str:
        """Play a short episode, twice if it is to be replayed; return the first observation.

        Raises:
            ValueError: the second time the environment answers in another way.
        """
        said = play(task)
        if config.replay and (again := play(task)) != said:
            raise ValueError(
                f"`replay` needs the same answers to the same turns, and it said {said!r:.200} and "
                f"then {again!r:.200}; drop `replay`, or draw everything random from `seed`"
            )
        return said[0]

    return first_words
