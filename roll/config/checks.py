"""What must hold between the parts of a config. Each problem is one line, `key: what and why`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from roll.config.algorithm import Aggregation
from roll.config.algorithm_checks import algorithm_problems
from roll.config.engine_options import NgramSpeculationConfig
from roll.config.errors import nearest
from roll.config.placement import parse_devices
from roll.config.roles import Role
from roll.config.rollout_checks import rollout_problems
from roll.config.shaping_checks import shaping_problems
from roll.config.strategy import HfScoreConfig, MegatronConfig, SglangConfig, VllmConfig

if TYPE_CHECKING:
    from roll.config.pipelines import RlvrConfig

_BACKWARD_ONLY = {
    "fsdp2": ("activation_checkpointing", "reduce_dtype"),
    "megatron": ("recompute", "aux_loss_coef", "distributed_optimizer"),
}
"""Options of backends that a model without a backward pass has no use for."""


def check_rlvr(config: RlvrConfig) -> None:
    """Raise one ValueError with every problem found."""
    problems = [
        *_pools(config),
        *_groups(config),
        *_layouts(config),
        *_batch(config),
        *_schedule(config),
        *algorithm_problems(config),
        *shaping_problems(config),
        *_sampling(config),
        *_tags(config),
        *_engine(config),
        *rollout_problems(config),
        *_checkpoint(config),
        *_without_effect(config),
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


def _groups(config: RlvrConfig) -> Iterator[str]:
    """Each engine takes consecutive devices of its pool, all on one node."""
    infer = config.actor_infer
    if infer.pool not in config.pools:
        return
    devices = parse_devices(config.pools[infer.pool])
    size = infer.devices_per_worker
    if len(devices) % size:
        yield (
            f"actor_infer.strategy.tp: a replica's {size} devices do not divide the "
            f"{len(devices)} devices of pool {infer.pool!r}"
        )
        return
    per_node = config.cluster.devices_per_node
    if per_node is None:
        return
    for start in range(0, len(devices), size):
        group = devices[start : start + size]
        if len({device // per_node for device in group}) > 1:
            yield (
                f"actor_infer.strategy.tp: devices {', '.join(map(str, group))} of pool "
                f"{infer.pool!r} make one engine but lie on several nodes of {per_node} devices; "
                "name them so that each group is on one node, or use a smaller tp"
            )


def _layouts(config: RlvrConfig) -> Iterator[str]:
    """Megatron's parallel sizes against the devices of the pool."""
    for name, role in config.computing.items():
        strategy = role.strategy
        if not isinstance(strategy, MegatronConfig) or role.pool not in config.pools:
            continue
        if name == Role.CRITIC:
            yield (
                "critic.strategy.kind: megatron has no value head, so it trains no critic; "
                "use fsdp2"
            )
        devices = config.num_devices(name)
        expert_tp = strategy.tp if strategy.etp is None else strategy.etp
        for size, what in (
            (strategy.tp * strategy.pp, "tp * pp"),
            (expert_tp * strategy.ep * strategy.pp, "etp * ep * pp"),
        ):
            if devices % size:
                yield (
                    f"{name}.strategy: {what} = {size} does not divide the {devices} devices of "
                    f"pool {role.pool!r}; give the pool a multiple of {size} or lower the sizes"
                )
                break


def _batch(config: RlvrConfig) -> Iterator[str]:
    if any(pool not in config.pools for pool in config.role_pools.values()):
        return
    samples = config.samples_per_step
    of_a_step = (
        f"{samples} samples of a step ({config.data.prompts_per_step} prompts x "
        f"{config.data.samples_per_prompt} samples)"
    )
    for name, role in config.trained.items():
        update, ranks = role.samples_per_update, config.num_parts(name)
        if samples % ranks:
            # No size of an update could help.
            yield (
                f"data.prompts_per_step: the {of_a_step} do not divide over the {ranks} "
                f"data-parallel ranks of pool {role.pool!r}; nearest that do: "
                f"{_nearest_prompts(config, ranks)}"
            )
        elif update is not None and (samples % update or update % ranks):
            known = [n for n in range(ranks, samples + 1, ranks) if samples % n == 0]
            why = (
                f"does not divide the {of_a_step}"
                if samples % update
                else f"does not divide over the {ranks} data-parallel ranks of pool {role.pool!r}"
            )
            yield f"{name}.samples_per_update: {update} {why}; nearest that do: " + _nearest(
                update, known
            )
    if config.reference is not None and samples % config.num_parts(Role.REFERENCE):
        devices = config.num_parts(Role.REFERENCE)
        divisors = [n for n in range(1, samples + 1) if samples % n == 0]
        yield (
            f"reference.pool: the {of_a_step} do not divide over the {devices} devices of pool "
            f"{config.reference.pool!r}; nearest numbers of devices that do: "
            f"{_nearest(devices, divisors)}"
        )


def _nearest_prompts(config: RlvrConfig, ranks: int) -> str:
    """Values of `prompts_per_step` whose samples divide over the ranks."""
    unit = ranks // math.gcd(ranks, config.data.samples_per_prompt)
    wanted = config.data.prompts_per_step
    return _nearest(wanted, range(unit, wanted + 2 * unit, unit))


def _nearest(wanted: int, known: Iterable[int]) -> str:
    """The next one below and above."""
    sorted_known = sorted(known)
    below = [n for n in sorted_known if n < wanted][-1:]
    above = [n for n in sorted_known if n > wanted][:1]
    return " and ".join(str(n) for n in below + above)


def _sampling(config: RlvrConfig) -> Iterator[str]:
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
    if not isinstance(strategy, VllmConfig | SglangConfig):
        return
    if strategy.max_model_len is not None:
        longest = config.max_sequence_tokens
        if strategy.max_model_len < longest:
            yield (
                f"actor_infer.strategy.max_model_len: {strategy.max_model_len} is less than the "
                f"{longest} tokens of data.max_prompt_tokens + max_new_tokens"
            )
    if isinstance(strategy, VllmConfig):
        yield from _vllm(config, strategy)


def _vllm(config: RlvrConfig, strategy: VllmConfig) -> Iterator[str]:
    yield from _speculation(config, strategy)
    if strategy.endpoint is not None and strategy.max_lora_rank:
        yield (
            "actor_infer.strategy.endpoint: requests from outside would be answered without the "
            "adapter; leave out the endpoint, or set max_lora_rank to 0"
        )
    dtype = config.actor_infer.dtype or config.train_model.dtype
    if strategy.quantization is not None and dtype == "float32":
        yield (
            "actor_infer.dtype: vLLM quantises weights of bfloat16 only; set it, or leave out "
            "actor_infer.strategy.quantization"
        )
    if strategy.quantization is not None and config.track.verify_weights != "never":
        yield (
            "track.verify_weights: a quantised engine does not hold what it was sent; set it to "
            "'never' where actor_infer.strategy.quantization is set"
        )


def _speculation(config: RlvrConfig, strategy: VllmConfig) -> Iterator[str]:
    if strategy.speculation is None:
        return
    sampling = config.sampling
    if (sampling.temperature, sampling.top_p, sampling.top_k) != (1.0, 1.0, -1):
        yield (
            "actor_infer.strategy.speculation: vLLM then reports log-probs of the unscaled and "
            "uncut distribution only; set sampling.temperature and sampling.top_p to 1 and "
            "sampling.top_k to -1, or leave out speculation"
        )
    if isinstance(strategy.speculation, NgramSpeculationConfig):
        low, high = strategy.speculation.min_match, strategy.speculation.max_match
        if low > high:
            yield (
                f"actor_infer.strategy.speculation.min_match: {low} is more than max_match = {high}"
            )


def _checkpoint(config: RlvrConfig) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.keep_best and checkpoint.best_metric is None:
        yield "checkpoint.best_metric: must be set when keep_best is above 0"
    metric = checkpoint.best_metric
    known = config.validation.metrics
    if metric is not None and metric not in known:
        yield (
            f"checkpoint.best_metric: no validation makes {metric!r}{nearest(metric, known)} "
            f"(known: {', '.join(known) or 'none, validation.sets is empty'})"
        )
    every, validated = checkpoint.every, config.validation.every
    if checkpoint.keep_best and every is not None and every < config.max_steps:
        meet = math.lcm(every, validated)
        if meet > config.max_steps:
            yield (
                f"checkpoint.keep_best: only checkpoints that are validated can be best, and a "
                f"checkpoint every {every} steps and a validation every {validated} meet first "
                f"at step {meet}, after max_steps = {config.max_steps}; make checkpoint.every a "
                "multiple of validation.every"
            )


def _schedule(config: RlvrConfig) -> Iterator[str]:
    for name, role in config.trained.items():
        optimizer, total = role.optimizer, max(config.total_updates(name), 1)
        if optimizer.schedule != "constant" and optimizer.warmup_steps >= total:
            yield (
                f"{name}.optimizer.warmup_steps: {optimizer.warmup_steps} steps of warm-up leave "
                f"none of the run's {total} optimizer steps for the {optimizer.schedule} decay; "
                f"use at most {total - 1}, or schedule=constant"
            )


def _without_effect(config: RlvrConfig) -> Iterator[str]:
    """Keys that were set and would change nothing."""
    algorithm, reference = config.algorithm, config.reference
    if (
        algorithm.aggregation_tokens is not None
        and algorithm.aggregation is not Aggregation.CONSTANT
    ):
        yield (
            "algorithm.aggregation_tokens: only `constant` aggregation divides by it, "
            f"algorithm.aggregation is {algorithm.aggregation.value}; drop one or change the other"
        )
    # Compared with the defaults, because a resolved config, which sets every key, must reload.
    if reference is not None and not isinstance(reference.strategy, HfScoreConfig):
        defaults = type(reference.strategy)()
        for name in _BACKWARD_ONLY[reference.strategy.kind]:
            if getattr(reference.strategy, name) != getattr(defaults, name):
                yield (
                    f"reference.strategy.{name}: concerns the backward pass, which a frozen "
                    "reference does not have; drop it"
                )
