"""Rules between `rollout` and the rest of a config."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.agentic_base import AgenticBase
from roll.config.algorithm import PassKConfig
from roll.config.errors import nearest
from roll.config.rlvr_base import RlvrBase


def rollout_problems(config: RlvrBase) -> Iterator[str]:
    """Yield the problems of `rollout`, one line each, `key: problem and reason`."""
    rollout = config.rollout
    if not config.generates and config.validation.sets:
        yield (
            "validation.sets: with rollout.replay there is no engine to validate with; drop them "
            "(validation.sets=null), and measure checkpoints with `roll eval`"
        )
    played = isinstance(config, AgenticBase)
    if played and rollout.siblings == "separate":
        yield (
            "rollout.siblings: episodes of a task are played separately in any case; drop it "
            "(rollout.redundant_samples does not need it here)"
        )
    if rollout.redundant_samples and rollout.siblings != "separate" and not played:
        yield (
            "rollout.redundant_samples: the samples of one request end together; set "
            "rollout.siblings=separate, or drop it"
        )
    yield from _drops(config)
    if rollout.loop is not None:
        if played:
            yield (
                "rollout.loop: episodes are played by environments; drop it, or use an "
                "environment with `agent: my_module:MyAgent`"
            )
        if rollout.siblings == "separate":
            yield "rollout.siblings: rollout.loop makes all samples of a prompt; drop one of them"
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
    elif rollout.in_flight == "restart" and (played or rollout.loop is not None):
        yield (
            "rollout.in_flight: restart begins a request anew, and here a sample is made of "
            "several, the earlier of which would keep their old weights; use continue, with "
            "algorithm.correction"
        )
    curriculum = config.data.curriculum
    if curriculum is not None and not config.rewards and not isinstance(config, AgenticBase):
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


def _drops(config: RlvrBase) -> Iterator[str]:
    """Yield rules on parts of a reward or an environment that the run does not have."""
    names = [*config.rewards, *(config.environments if isinstance(config, AgenticBase) else ())]
    for i, rule in enumerate(config.rollout.drop):
        owner = rule.part.partition("/")[0]
        if owner not in names:
            yield (
                f"rollout.drop.{i}.part: {rule.part!r} is of no reward or environment of the run"
                f"{nearest(owner, names)} (known: {', '.join(names) or 'none'})"
            )
