"""Rules between filters, shaping and the rest of a config; see `roll.config.checks.common`."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.algorithm import NormalizeRewardConfig, OverlongPenaltyConfig, RewardShapingConfig
from roll.config.rlvr_base import RlvrBase


def shaping_problems(config: RlvrBase) -> Iterator[str]:
    """Yield the problems of filters and shaping, one line each, `key: problem and reason`."""
    alone = config.data.samples_per_prompt < 2
    for filters, choices in config.filters.items():
        for i, choice in enumerate(choices):
            if choice.kind == "equal_rewards" and alone:
                yield (
                    f"{filters}.{i}: a group of 1 always has equal rewards; set "
                    "data.samples_per_prompt to at least 2"
                )
    limits = {f"domains.{t}.reward_shaping": s for t, s in config.domain_sampling.items()}
    for shapings, parts in config.reward_shapings.items():
        own = limits.get(shapings)
        longest = config.max_response_tokens if own is None else own.max_new_tokens
        for i, shaping in enumerate(parts):
            yield from _reward_shaping(f"{shapings}.{i}", shaping, longest, alone=alone)
    kl = config.algorithm.kl_in_reward
    if kl is not None and kl.target is not None and kl.horizon < config.samples_per_step:
        yield (
            f"algorithm.kl_in_reward.horizon: {kl.horizon} samples are less than the "
            f"{config.samples_per_step} of one step, so a step would change the coefficient by more"
            " than a fifth; raise it"
        )


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
                f"max_tokens - buffer_tokens = {free}, sampling.max_new_tokens is {longest}"
            )
