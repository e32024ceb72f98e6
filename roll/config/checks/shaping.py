"""Rules between filters, shaping and the rest of a config; see `roll.config.checks.common`."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.algorithm import NormalizeRewardConfig, OverlongPenaltyConfig
from roll.config.rlvr_base import RlvrBase


def shaping_problems(config: RlvrBase) -> Iterator[str]:
    """Yield the problems of filters and shaping, one line each, `key: problem and reason`."""
    alone = config.data.samples_per_prompt < 2
    for i, choice in enumerate(config.rollout.filters):
        if choice.kind == "equal_rewards" and alone:
            yield (
                f"rollout.filters.{i}: a group of 1 always has equal rewards; set "
                "data.samples_per_prompt to at least 2"
            )
    longest = config.sampling.max_new_tokens
    for i, shaping in enumerate(config.algorithm.reward_shaping):
        key = f"algorithm.reward_shaping.{i}"
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
                continue
            free = most - buffer
            if longest <= free:
                yield (
                    f"{key}: no response is long enough to be penalized: the penalty begins after "
                    f"max_tokens - buffer_tokens = {free}, sampling.max_new_tokens is {longest}"
                )
    kl = config.algorithm.kl_in_reward
    if kl is not None and kl.target is not None and kl.horizon < config.samples_per_step:
        yield (
            f"algorithm.kl_in_reward.horizon: {kl.horizon} samples are less than the "
            f"{config.samples_per_step} of one step, so a step would change the coefficient by more"
            " than a fifth; raise it"
        )
