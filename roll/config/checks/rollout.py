"""Rules between `rollout` and the rest of a config."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.algorithm import PassKConfig
from roll.config.rlvr_base import RlvrBase


def rollout_problems(config: RlvrBase) -> Iterator[str]:
    """Yield the problems of `rollout`, one line each, `key: problem and reason`."""
    rollout = config.rollout
    if rollout.redundant_samples and rollout.siblings != "separate":
        yield (
            "rollout.redundant_samples: the samples of one request end together; set "
            "rollout.siblings=separate, or drop it"
        )
    estimators = config.advantages.values()
    if rollout.redundant_samples and any(isinstance(e, PassKConfig) for e in estimators):
        yield (
            "rollout.redundant_samples: pass@k training counts how many of n independent samples "
            "pass, and those that end first are not independent of their success; drop it"
        )
    if rollout.in_flight == "restart" and not rollout.max_staleness:
        yield (
            "rollout.in_flight: with rollout.max_staleness=0 nothing is in flight when new weights "
            "come; drop it or raise max_staleness"
        )
    curriculum = config.data.curriculum
    if curriculum is not None and not config.rewards:
        yield "data.curriculum: reads rewards, and there are none; add `rewards`, or drop it"
    if curriculum is not None and curriculum.sources and len(config.data.sources) < 2:
        yield (
            "data.curriculum.sources: there is one source, and nothing to share; drop it or add "
            "another source"
        )
    if rollout.health.timeout_s < rollout.health.heartbeat_s:
        yield (
            f"rollout.health.timeout_s: {rollout.health.timeout_s:g} s is less than the "
            f"{rollout.health.heartbeat_s:g} s between two heartbeats"
        )
