"""Rules between filters, shaping and the rest of a config; see `roll.config.checks.common`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from roll.config.agentic_base import AgenticBase
from roll.config.algorithm import (
    ClipRewardConfig,
    GigpoConfig,
    NormalizeRewardConfig,
    OverlongPenaltyConfig,
    RewardShapingConfig,
    ScaleRewardConfig,
    TurnGaeConfig,
)
from roll.config.rlvr_base import RlvrBase


def shaping_problems(config: RlvrBase) -> Iterator[str]:
    """Yield the problems of filters and shaping, one line each, `key: problem and reason`."""
    alone = config.compared_samples < 2
    for filters, choices in config.filters.items():
        for i, choice in enumerate(choices):
            if choice.kind == "equal_rewards" and alone:
                yield (
                    f"{filters}.{i}: a group of 1 always has equal rewards; set "
                    "data.samples_per_prompt to at least 2"
                )
    limits = {
        f"domains.{t}.reward_shaping": config.max_response_tokens_of(t) for t in config.domains
    }
    for shapings, parts in config.reward_shapings.items():
        longest = limits.get(shapings, config.max_response_tokens)
        for i, shaping in enumerate(parts):
            yield from _reward_shaping(f"{shapings}.{i}", shaping, longest, alone=alone)
    # Once each: the shaping of the run is that of several tags.
    yield from dict.fromkeys([*_of_turns(config), *_beside_turns(config)])
    kl = config.algorithm.kl_in_reward
    if kl is not None and kl.target is not None and kl.horizon < config.samples_per_step:
        yield (
            f"algorithm.kl_in_reward.horizon: {kl.horizon} samples are less than the "
            f"{config.samples_per_step} of one step, so a step would change the coefficient by more"
            " than a fifth; raise it"
        )


def _of_turns(config: RlvrBase) -> Iterator[str]:
    """Yield changes of the total reward that belong to all turns, where an advantage of turns would
    give them to the last one."""
    for advantage, key, shaping in config.shaped_advantages:
        if not isinstance(advantage, GigpoConfig | TurnGaeConfig):
            continue
        for place, kind in _of_total(key, shaping):
            yield (
                f"{place}: {kind} changes the reward of a whole episode, and {advantage.kind} "
                "reads those of its turns; drop it, or use another advantage"
            )
        if config.algorithm.kl_in_reward is not None:
            yield (
                f"algorithm.kl_in_reward: {advantage.kind} would give the penalty of all turns to "
                "the last; use the loss term `kl`, or another advantage"
            )


def _beside_turns(config: RlvrBase) -> Iterator[str]:
    """Yield changes of the total reward where the rewards of turns, which are most of it, stand
    apart."""
    for name, environment in config.environments.items() if isinstance(config, AgenticBase) else ():
        for tag in environment.tags if environment.credit == "turns" else ():
            if isinstance(config.advantage_of(tag), GigpoConfig | TurnGaeConfig):
                continue  # see `_of_turns`
            for place, kind in _of_total(*config.shaping_of(tag)):
                yield (
                    f"{place}: with environments.{name}.credit: turns, rewards of turns stand "
                    f"apart and {kind} does not change them; drop it (for one tag: "
                    "domains.<tag>.reward_shaping), or use credit: episode"
                )


def _of_total(key: str, shaping: Sequence[RewardShapingConfig]) -> Iterator[tuple[str, str]]:
    """Yield the key and the kind of each part that changes the total reward by its size; `key` is
    that of the shaping."""
    for i, part in enumerate(shaping):
        if isinstance(part, ClipRewardConfig | ScaleRewardConfig | NormalizeRewardConfig):
            yield f"{key}.{i}", part.kind


def _reward_shaping(
    key: str, shaping: RewardShapingConfig, longest: int, *, alone: bool
) -> Iterator[str]:
    """Yield the problems of one part of reward shaping.

    Args:
        key: key of the part in the config, for the message.
        longest: largest number of tokens of a response.
        alone: True if there is one sample per prompt.
    """
    if isinstance(shaping, NormalizeRewardConfig) and alone:
        for moment, level in (("mean", shaping.mean), ("std", shaping.std)):
            if level == "group":
                yield (
                    f"{key}.{moment}: a group of 1 has no {moment} of its own; use batch or "
                    "running, or set data.samples_per_prompt to at least 2"
                )
    if isinstance(shaping, OverlongPenaltyConfig):
        try:
            most, buffer = shaping.within(longest).limits()
        except ValueError as error:
            yield f"{key}: {error}"
            return
        free = most - buffer
        if longest <= free:
            yield (
                f"{key}: no response is long enough to be penalized: the penalty begins after "
                f"max_tokens - buffer_tokens = {free}, and the limit is {longest}"
            )
