"""Start of the reward workers: functions and classes, and reward models, which share devices."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from roll.config.rlvr_base import RlvrBase
from roll.config.sections.placement import parse_devices
from roll.config.sections.reward import RewardConfig
from roll.config.sections.roles import Role
from roll.config.sections.services.judge import JudgeConfig
from roll.distributed.cluster import Launcher, Placement
from roll.distributed.colocation import Colocation, Resident
from roll.runtime.reward_router import RewardCluster
from roll.workers.reward import RewardWorker
from roll.workers.reward_classes import reward_recipe


def start_functions(config: RlvrBase, launcher: Launcher) -> dict[str, RewardCluster]:
    """Start the rewards that are functions or classes; return them by name."""
    return {
        name: _start(config, launcher, name, reward)
        for name, reward in config.rewards.items()
        if reward.model is None
    }


def start_reward_models(
    config: RlvrBase, launcher: Launcher, colocation: Colocation
) -> dict[str, RewardCluster]:
    """Start the reward models, one after another; return them by name. Meanwhile the engines must
    be off their devices.

    A reward model scores while engines generate. So it moves onto and off its devices together with
    the engines, and a role that trains on these devices moves it off.
    """
    reward_models = {}
    for name, reward in config.rewards.items():
        if reward.model is None:
            continue
        reward_models[name] = _start(config, launcher, name, reward)
        devices = frozenset(parse_devices(config.pools[pool_of(config, reward)]))
        colocation.add(f"{Role.ACTOR_INFER}/{name}", resident(reward_models[name], devices))
    return reward_models


def resident(reward_model: RewardCluster, devices: frozenset[int]) -> Resident:
    """Return the reward model as a resident of its devices."""
    from roll.workers.model_reward import ModelReward

    cluster = reward_model.cluster
    return Resident(
        devices,
        onload=partial(cluster.call, ModelReward.onload),
        offload=partial(cluster.call, ModelReward.offload),
        # The reward model moves together with the engines, but a push sends it no weights.
        onload_weights=lambda: None,
    )


def pool_of(config: RlvrBase, reward: RewardConfig) -> str:
    """Return the name of the device pool for a reward's workers; by default that of the engines."""
    return reward.pool or config.actor_infer.pool


def reward_model_devices(config: RlvrBase) -> frozenset[int]:
    """Return the devices of all reward models together."""
    pools = [pool_of(config, reward) for reward in config.rewards.values() if reward.model]
    return frozenset(device for pool in pools for device in parse_devices(config.pools[pool]))


def _start(config: RlvrBase, launcher: Launcher, name: str, reward: RewardConfig) -> RewardCluster:
    """Start the workers of one reward and wait until they are ready; a reward model gets one on
    each device of its pool."""
    place = Placement(
        Role.REWARD,
        pool=pool_of(config, reward),
        workers=None if reward.model else reward.workers,
        seed=config.seed,
        label=name,
        env=reward.env,
    )
    sharers = 1 if reward.judge is None else config.sharers(reward.judge.by)
    hosted = start_reward(name, reward, launcher, place, judges=config.judges, sharers=sharers)
    if reward.process:
        hosted.cluster.call(RewardWorker.use_tokenizer, config.train_model)
    return hosted


def start_reward(
    name: str,
    reward: RewardConfig,
    launcher: Launcher,
    place: Placement,
    *,
    judges: Mapping[str, JudgeConfig],
    sharers: int = 1,
) -> RewardCluster:
    """Start the workers of one reward at `place`, and wait until they are ready.

    Args:
        judges: judges by name.
        sharers: number of reward workers that ask the judge of this reward.
    """
    worker, arguments = reward_recipe(name, reward, judges, sharers=sharers)
    cluster = launcher.start(worker, place, *arguments)
    cluster.call(RewardWorker.start)
    return RewardCluster(reward, cluster)
