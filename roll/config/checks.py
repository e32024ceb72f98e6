"""What must hold between the parts of a config. Each problem is one line, `key: what and why`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from roll.config.errors import nearest
from roll.config.placement import parse_devices
from roll.config.roles import Role
from roll.config.strategy import VllmConfig

if TYPE_CHECKING:
    from roll.config.pipelines import RlvrConfig


def check_rlvr(config: RlvrConfig) -> None:
    """Raise one ValueError with every problem found."""
    problems = [
        *_pools(config),
        *_batch(config),
        *_algorithm(config),
        *_tags(config),
        *_engine(config),
        *_checkpoint(config),
    ]
    if problems:
        raise ValueError("\n".join(problems))


def _pools(config: RlvrConfig) -> Iterator[str]:
    known = ", ".join(config.pools)
    for name, reward in config.rewards.items():
        if reward.pool is not None and reward.pool not in config.pools:
            hint = nearest(reward.pool, config.pools)
            yield f"rewards.{name}.pool: no pool {reward.pool!r}{hint} (pools: {known})"
    for role, pool in config.role_pools.items():
        if pool not in config.pools:
            yield f"{role}.pool: no pool {pool!r}{nearest(pool, config.pools)} (pools: {known})"
    per_node = config.cluster.devices_per_node
    if per_node is None and config.cluster.nodes > 1:
        yield "cluster.devices_per_node: must be set when cluster.nodes is above 1"
    if per_node is not None:
        total = per_node * config.cluster.nodes
        for name, text in config.pools.items():
            largest = max(parse_devices(text))
            if largest >= total:
                yield (
                    f"pools.{name}: names device {largest}, but the cluster has {total} devices "
                    f"({config.cluster.nodes} nodes x {per_node}), 0 to {total - 1}"
                )
    infer = config.actor_infer
    if infer.pool in config.pools:
        devices = len(parse_devices(config.pools[infer.pool]))
        if devices % infer.devices_per_worker:
            yield (
                f"actor_infer.strategy.tp: {infer.devices_per_worker} does not divide the "
                f"{devices} devices of pool {infer.pool!r}"
            )


def _batch(config: RlvrConfig) -> Iterator[str]:
    if any(pool not in config.pools for pool in config.role_pools.values()):
        return
    samples = config.samples_per_step
    update = config.actor_train.samples_per_update or samples
    ranks = config.num_devices(Role.ACTOR_TRAIN)
    if samples % update:
        yield (
            f"actor_train.samples_per_update: {update} does not divide the {samples} samples of a "
            f"step ({config.data.prompts_per_step} prompts x {config.data.samples_per_prompt} "
            f"samples); nearest that do: {_nearest_divisors(samples, update)}"
        )
    elif update % ranks:
        key = "actor_train.samples_per_update"
        if config.actor_train.samples_per_update is None:
            key = "data.prompts_per_step"
        yield (
            f"{key}: {update} samples per optimizer step do not divide over the {ranks} devices "
            f"of pool {config.actor_train.pool!r}; nearest that do: "
            f"{update - update % ranks or ranks} and {update - update % ranks + ranks}"
        )
    if config.reference is not None and samples % config.num_devices(Role.REFERENCE):
        yield (
            f"reference.pool: {samples} samples of a step do not divide over the "
            f"{config.num_devices(Role.REFERENCE)} devices of pool {config.reference.pool!r}"
        )


def _nearest_divisors(total: int, wanted: int) -> str:
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    below = max((d for d in divisors if d < wanted), default=None)
    above = min((d for d in divisors if d > wanted), default=None)
    return " and ".join(str(d) for d in (below, above) if d is not None)


def _algorithm(config: RlvrConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.needs_reference and config.reference is None:
        yield "algorithm.loss: the `kl` term needs a `reference` role; add one or drop the term"
    if algorithm.advantage.kind == "grpo" and config.data.samples_per_prompt < 2:
        yield (
            "data.samples_per_prompt: grpo compares the samples of one prompt and needs at least "
            "2; with 1 use algorithm.advantage.kind=reinforce"
        )
    if config.rollout.drop_equal_rewards and config.data.samples_per_prompt < 2:
        yield (
            "rollout.drop_equal_rewards: a group of 1 always has equal rewards; set "
            "data.samples_per_prompt to at least 2"
        )
    if config.sampling.temperature == 0:
        yield "sampling.temperature: 0 makes all samples of a prompt equal; training needs more"
    greedy = config.validation_sampling.temperature == 0
    if config.validation.sets and greedy and config.validation.samples_per_prompt > 1:
        yield (
            "validation.samples_per_prompt: greedy sampling gives the same sample "
            f"{config.validation.samples_per_prompt} times; use 1 or a temperature above 0"
        )


def _tags(config: RlvrConfig) -> Iterator[str]:
    rewarded = {tag for reward in config.rewards.values() for tag in reward.tags}
    sources = {f"data.sources.{i}": source for i, source in enumerate(config.data.sources)}
    sources |= {f"validation.sets.{name}": s for name, s in config.validation.sets.items()}
    for key, source in sources.items():
        if source.columns.tag is None and source.tag not in rewarded:
            yield (
                f"{key}.tag: no reward takes the tag {source.tag!r}{nearest(source.tag, rewarded)} "
                f"(tags with a reward: {', '.join(sorted(rewarded))})"
            )
    if all(source.columns.tag is None for source in sources.values()):
        used = {source.tag for source in sources.values()}
        for name, reward in config.rewards.items():
            for tag in reward.tags:
                if tag not in used:
                    yield (
                        f"rewards.{name}.tags: no source has the tag {tag!r}{nearest(tag, used)} "
                        f"(tags of the sources: {', '.join(sorted(used))})"
                    )


def _engine(config: RlvrConfig) -> Iterator[str]:
    strategy = config.actor_infer.strategy
    if isinstance(strategy, VllmConfig) and strategy.max_model_len is not None:
        longest = config.max_sequence_tokens
        if strategy.max_model_len < longest:
            yield (
                f"actor_infer.strategy.max_model_len: {strategy.max_model_len} is less than the "
                f"{longest} tokens of data.max_prompt_tokens + max_new_tokens"
            )


def _checkpoint(config: RlvrConfig) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.keep_best and checkpoint.best_metric is None:
        yield "checkpoint.best_metric: must be set when keep_best is above 0"
    metric = checkpoint.best_metric
    if metric is not None:
        n = config.validation.samples_per_prompt
        known = [
            f"val/{name}/{kind}@{n}"
            for name in config.validation.sets
            for kind in (["mean"] if n == 1 else ["mean", "pass", "maj"])
        ]
        if metric not in known:
            yield (
                f"checkpoint.best_metric: no validation makes {metric!r}{nearest(metric, known)} "
                f"(known: {', '.join(known) or 'none, validation.sets is empty'})"
            )
