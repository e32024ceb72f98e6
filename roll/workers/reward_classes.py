"""The class of worker that hosts a configured reward."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from roll.config.sections.reward import RewardConfig
from roll.config.sections.services.judge import JudgeConfig, UrlJudgeConfig
from roll.config.user_code.arguments import check_arguments
from roll.config.user_code.import_path import load_object
from roll.core.errors import ConfigError
from roll.rewards.service.client import find_key
from roll.workers.reward import FunctionReward, RewardWorker
from roll.workers.services.judge import JudgeAccess, JudgeReward
from roll.workers.services.remote import RemoteReward


def reward_recipe(
    name: str,
    config: RewardConfig,
    judges: Mapping[str, JudgeConfig],
    *,
    sharers: int = 1,
    environ: Mapping[str, str] = os.environ,
) -> tuple[type[RewardWorker], tuple[Any, ...]]:
    """Return the worker class for a reward, and what its constructor takes after the `WorkerSpec`.

    Args:
        name: name of the reward.
        config: the reward.
        judges: judges of the run by name.
        sharers: number of reward workers that ask the judge of this reward.
        environ: environment with the keys of services.

    Raises:
        ConfigError: a key is missing; or as of `reward_worker_class`.
    """
    if config.judge is not None:
        judge = judges[config.judge.by]
        key = None
        if isinstance(judge, UrlJudgeConfig):
            key = find_key(f"judges.{config.judge.by}", judge, environ)
        return JudgeReward, (name, config, JudgeAccess(judge, sharers, key))
    if config.remote is not None:
        key = find_key(f"rewards.{name}.remote", config.remote, environ)
        return RemoteReward, (name, config, key)
    return reward_worker_class(name, config), (name, config)


def reward_worker_class(name: str, config: RewardConfig) -> type[RewardWorker]:
    """Return the worker class for a reward that asks no service.

    Raises:
        ConfigError: `worker` is not a subclass of RewardWorker, does not define `score`, or its
            `setup` does not take `kwargs`.
    """
    if config.model is not None:
        # Of all rewards this one alone needs torch.
        from roll.workers.model_reward import ModelReward

        return ModelReward
    if config.worker is None:
        return FunctionReward
    found = load_object(config.worker)
    if not (isinstance(found, type) and issubclass(found, RewardWorker)):
        raise ConfigError(
            f"rewards.{name}.worker: {config.worker!r} is not a subclass of "
            "roll.workers.reward.RewardWorker"
        )
    if found.score is RewardWorker.score:
        raise ConfigError(f"rewards.{name}.worker: {config.worker!r} does not define `score`")
    check_arguments(
        found.setup,
        2,
        config.kwargs,
        where=f"rewards.{name}.kwargs",
        what=f"setup of {found.__name__}",
    )
    return found
