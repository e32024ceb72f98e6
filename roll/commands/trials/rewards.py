"""Trial of each reward on a real row with a short response, before a run starts.

The trial runs in its own process, with the time limit of the reward. So everything that the reward
imports, opens or breaks is gone afterwards, and a function that hangs is killed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from roll.config.errors import UserError
from roll.config.sections.reward import RewardConfig
from roll.config.sections.services.judge import ClusterJudgeConfig, JudgeConfig, UrlJudgeConfig
from roll.core.completion import Completion, FinishReason
from roll.core.errors import ConfigError
from roll.core.types import Prompt, Sample
from roll.distributed.on_ray.environment import replace_environment
from roll.rewards.api import Reward
from roll.rewards.execution.child import (
    Child,
    ChildDiedError,
    ChildRaisedError,
    ChildSpec,
    ChildTimeoutError,
)

if TYPE_CHECKING:
    from pathlib import Path

    from roll.commands.trials.result import Trial
    from roll.rewards.loading import Work

SHORT_CHARS = 200
"""Largest length of the response in a trial, in characters; the response is the row's answer."""
BAD_RESPONSE = "I do not know."
SETUP_TIMEOUT_S = 60.0
"""Time limit of the `setup` of a reward class, in seconds."""


def try_rewards(
    rewards: Mapping[str, RewardConfig],
    folder: Path,
    trial: Trial,
    judges: Mapping[str, JudgeConfig] = MappingProxyType({}),
) -> None:
    """Add to `trial` the score of each reward for a row with its tag, or the error; reward models,
    judges on devices of the run, and rewards without such a row, are added as untried. A judge
    behind a server is asked.

    Args:
        rewards: rewards by name.
        folder: folder of the user's modules, which a reward may name.
        trial: results so far, with a row for each tag.
        judges: judges by name.
    """
    for name, reward in rewards.items():
        row = next((trial.rows[tag] for tag in reward.tags if tag in trial.rows), None)
        judge = None if reward.judge is None else judges[reward.judge.by]
        if reward.model is not None or isinstance(judge, ClusterJudgeConfig) or row is None:
            why = "a model" if reward.model else "no row" if row is None else "a judge of the run"
            trial.untried.append(f"rewards.{name} ({why})")
            continue
        service = reward.remote or judge
        if service is not None and service.api_key_env and not os.environ.get(service.api_key_env):
            trial.untried.append(f"rewards.{name} (no {service.api_key_env})")
            continue
        sample = short_sample(row)
        try:
            verdict = _verdict(name, reward, folder, sample, judge)
        except UserError as error:
            trial.wrong.append(error)
        else:
            if isinstance(verdict, list):
                verdict = verdict[0]
            if (verdict.steps or verdict.token_rewards is not None) and not reward.process:
                trial.wrong.append(
                    ConfigError(
                        f"rewards.{name}.process: {reward.what} returned rewards of steps; set "
                        "process: true"
                    )
                )
                continue
            parts = ", ".join(f"{part} {value:g}" for part, value in verdict.parts.items())
            trial.told.append(
                f"rewards.{name}: {verdict.score:g} for the response {sample.response_text!r:.60} "
                f"to row {row.id}" + (f" ({parts})" if parts else "")
            )


def short_sample(row: Prompt) -> Sample:
    """Return a finished response that consists of the last line of the row's answer; `42` if there
    is no answer."""
    text = row.answer.strip().splitlines()[-1][:SHORT_CHARS] if row.answer.strip() else "42"
    num_tokens = len(text.split())
    zeros = [0] * num_tokens
    done = Completion.of(zeros, zeros, zeros, FinishReason.STOP)
    group = f"0/{row.id}"
    return Sample(f"{group}/0", group, row, done, text)


def _verdict(
    name: str,
    reward: RewardConfig,
    folder: Path,
    sample: Sample,
    judge: UrlJudgeConfig | None,
) -> Reward | list[Reward]:
    """Score a sample in a child process that is then killed; a group reward gets the sample and an
    empty response as a group. ConfigError if the reward fails or is too slow."""
    factory = "roll.commands.trials.rewards:make_trial"
    asked = None if judge is None else judge.model_dump()
    child = Child(ChildSpec(factory, (str(folder), name, reward.model_dump(), asked)))
    limit_s = reward.limit_s + (SETUP_TIMEOUT_S if reward.worker else 0.0)
    key = f"rewards.{name}.timeout_s"
    service = reward.remote or judge
    if service is not None:
        limit_s = service.timeout_s * service.tries + SETUP_TIMEOUT_S
        owner = f"judges.{reward.judge.by}" if reward.judge else f"rewards.{name}.remote"
        key = f"{owner}.timeout_s"
    try:
        found = child.call(_group(sample, reward) if reward.per == "group" else sample, limit_s)
    except ChildTimeoutError:
        raise ConfigError(
            f"rewards.{name}: {reward.what} gave nothing on row {sample.prompt.id} within "
            f"{limit_s:g} s; mend it or raise {key}, or check with --fast if it cannot work on "
            "this machine"
        ) from None
    except (ChildRaisedError, ChildDiedError, OSError) as error:
        raise ConfigError(
            f"rewards.{name}: {reward.what} fails on row {sample.prompt.id}, for the response "
            f"{sample.response_text!r:.60}; mend it, or check with --fast if it cannot work on "
            f"this machine:\n{str(error).rstrip()}"
        ) from None
    finally:
        child.close()
    assert isinstance(found, Reward | list)
    return found


def _group(sample: Sample, reward: RewardConfig) -> list[Sample]:
    """Return a group of the sample and an empty response; for a judge, which is not asked about
    empty ones, and a bad response."""
    text = BAD_RESPONSE if reward.judge is not None else ""
    zeros = [0] * len(text.split())
    other = Completion.of(zeros, zeros, zeros, FinishReason.STOP).with_text(text)
    return [sample, replace(sample, id=f"{sample.group}/1", completion=other)]


def make_trial(
    folder: str, name: str, settings: dict[str, Any], judge: dict[str, Any] | None = None
) -> Callable[[Any], Any]:
    """Load the reward and return the function that scores one sample; called in the child process.

    The function is async for classes, services and async rewards. `folder` goes first on
    `sys.path`; `judge` has the settings of the reward's judge.
    """
    sys.path.insert(0, folder)
    config = RewardConfig.model_validate(settings)
    replace_environment({**os.environ, **config.env})
    if config.fn is not None:
        from roll.rewards.api import RewardContext
        from roll.rewards.execution.runners import make_child_reward

        return make_child_reward(config.fn, config.kwargs, RewardContext(name=name, seed=0))
    known: dict[str, JudgeConfig] = {}
    if config.judge is not None:
        known[config.judge.by] = UrlJudgeConfig.model_validate(judge)
    return _trial_of_class(name, config, known)


def _trial_of_class(
    name: str, config: RewardConfig, judges: Mapping[str, JudgeConfig]
) -> Callable[[Any], Any]:
    """Build a reward worker in this process; return an async function that sets it up, scores one
    sample, or group, and tears it down, also after an error of the score."""
    import inspect

    from roll.config.sections.roles import Role
    from roll.core.types import WorkerSpec
    from roll.rewards.loading import normalise
    from roll.workers.reward_classes import reward_recipe
    from roll.workers.services.base import ServiceReward

    spec = WorkerSpec(Role.REWARD, 0, 1, (), (), 0, "127.0.0.1:0", 0, "cpu", label=name)
    worker_class, arguments = reward_recipe(name, config, judges)
    worker = worker_class(spec, *arguments)

    async def score(work: Work) -> Any:
        await worker.setup(worker.ctx, **config.kwargs)
        try:
            if isinstance(worker, ServiceReward):
                return await worker.verdict(work)
            assert isinstance(work, Sample)
            value: Any = worker.score(work, worker.ctx)
            return normalise(await value if inspect.isawaitable(value) else value)
        finally:
            await worker.teardown()

    return score
