"""The class of worker that hosts a configured reward."""

from __future__ import annotations

from roll.config.sections.reward import RewardConfig
from roll.core.errors import ConfigError
from roll.core.registry import load_object
from roll.workers.reward import FunctionReward, RewardWorker


def reward_worker_class(name: str, config: RewardConfig) -> type[RewardWorker]:
    """Return the worker class for a reward of the config.

    Raises:
        ConfigError: `worker` is not a subclass of RewardWorker, or does not define `score`.
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
    return found
