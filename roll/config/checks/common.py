"""Rules between the parts of any config. A problem is one line, `key: problem and reason`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from roll.config.checks.adapter import (
    further_layer_problems,
    part_problems,
    sharded_adapter_problems,
    untrained_problems,
)
from roll.config.errors import nearest
from roll.config.sections.data import FileConfig
from roll.config.sections.engines import HfEngineConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.optimizers.backends import optimizer_problem
from roll.config.sections.optimizers.base import OptimizerBase
from roll.config.sections.placement import parse_devices
from roll.config.sections.roles import Role
from roll.config.sections.strategy import Fsdp2Config, HfScoreConfig, MegatronConfig, row_cuts
from roll.config.sections.training import LearnerRole, ScoreRole

if TYPE_CHECKING:
    from roll.config.run import RunConfig

_BACKWARD_ONLY = {
    "fsdp2": ("activation_checkpointing", "offload_activations", "reduce_dtype"),
    "deepspeed": (
        "activation_checkpointing",
        "offload_activations",
        "reduce_dtype",
        "offload_optimizer",
    ),
    "megatron": (
        "recompute",
        "aux_loss_coef",
        "distributed_optimizer",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "mtp_loss_weight",
        "mtp_detached",
    ),
}
"""Options of each backend that have no effect on a model without a backward pass."""


def usual_pool(config: RunConfig) -> str:
    """Return the pool for a role that a message proposes: that of the policy, if it exists."""
    named = config.roles[Role.ACTOR_TRAIN].pool
    return named if named in config.pools else next(iter(config.pools))


def run_problems(config: RunConfig) -> Iterator[str]:
    """Yield the problems that a run file of any pipeline can have."""
    yield from _pools(config)
    yield from _layouts(config)
    yield from _optimizers(config)
    yield from _schedule(config)
    yield from _profile(config)
    yield from _checkpoint(config)
    yield from _frozen(config)
    yield from sharded_adapter_problems(config)
    yield from part_problems(config)
    yield from further_layer_problems(config)
    yield from untrained_problems(config)


def raise_if_any(problems: Iterable[str]) -> None:
    """Raise one ValueError that names all problems, unless there is none."""
    found = list(problems)
    if found:
        raise ValueError("\n".join(found))


def _pools(config: RunConfig) -> Iterator[str]:
    """Yield roles in unknown pools, pools with devices that the cluster lacks, and a missing
    `devices_per_node`."""
    known = ", ".join(config.pools)
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


def _profile(config: RunConfig) -> Iterator[str]:
    """Yield roles in `profile` that do not exist or have no PyTorch of ours to record, and steps
    that the run does not have."""
    profile = config.profile
    if profile is None:
        return
    for role in profile.roles:
        if role not in config.computing:
            known = ", ".join(config.computing)
            yield f"profile.roles: no role {role!r} trains or scores (roles that do: {known})"
    for step in profile.steps:
        if step >= config.max_steps:
            last = config.max_steps - 1
            yield f"profile.steps: no step {step}; the run has the steps 0 to {last}"


def _layouts(config: RunConfig) -> Iterator[str]:
    """Yield what a role's backend cannot do: attention, packing, or parallel sizes that do not
    divide the pool's devices. Roles in unknown pools are skipped."""
    for name, role in config.computing.items():
        strategy = role.strategy
        if role.pool not in config.pools:
            continue
        yield from _attention(config, name, role)
        yield from _compiled(config, name, role)
        if isinstance(strategy, Fsdp2Config):
            yield from _indivisible_size_problems(config, name, strategy.sizes)
        if not isinstance(strategy, MegatronConfig):
            continue
        expert_tp = strategy.tp if strategy.etp is None else strategy.etp
        yield from _indivisible_size_problems(
            config,
            name,
            [
                (strategy.ranks_per_part, "tp * pp" if strategy.cp == 1 else "tp * cp * pp"),
                (expert_tp * strategy.ep * strategy.pp, "etp * ep * pp"),
            ],
        )


def _indivisible_size_problems(
    config: RunConfig, name: str, sizes: list[tuple[int, str]]
) -> Iterator[str]:
    """Yield a problem for the first size that does not divide the number of the role's devices.

    Args:
        name: key of the role, whose pool must be known.
        sizes: pairs of a size and its formula for the message, such as `tp * pp`.
    """
    devices = config.num_devices(name)
    for size, what in sizes:
        if devices % size:
            yield (
                f"{name}.strategy: {what} = {size} does not divide the {devices} devices of "
                f"pool {config.role_pools[name]!r}; give the pool a multiple of {size} or lower "
                "the sizes"
            )
            return


def _attention(config: RunConfig, name: str, role: LearnerRole | ScoreRole) -> Iterator[str]:
    """Yield attention kernels that the backend lacks, or that cannot handle the rows that the role
    makes.

    Args:
        name: key of the role `role`, for the message.
    """
    strategy = role.strategy
    model = role.model or config.train_model
    attention = model.attention
    where = config.model_key(name)
    if isinstance(strategy, MegatronConfig):
        if model.changed("attention") and not _in_transformers(config, model):
            yield (
                f"{where}.attention: {attention} is a kernel of Hugging Face models, and {name} is "
                "of kind: megatron, which has its own; leave attention out"
            )
        return
    cut = [f"strategy.{key}" for key in row_cuts(strategy)]
    refused = {
        "eager": [*(["packing"] if role.packing else []), *cut],
        "flash_attention_2": cut,
        "flash_attention_3": cut,
    }
    if keys := refused.get(attention):
        yield (
            f"{where}.attention: {attention} takes no rows such as {name}.{keys[0]} makes; use sdpa"
        )


def _compiled(config: RunConfig, name: str, role: LearnerRole | ScoreRole) -> Iterator[str]:
    """Yield a compiled model whose layers the role's backend does not compile.

    Args:
        name: key of the role `role`, for the message.
    """
    strategy = role.strategy
    if not (role.model or config.train_model).compile:
        return
    where = config.model_key(name)
    if isinstance(strategy, MegatronConfig):
        yield (
            f"{where}.compile: compiles layers of Hugging Face models, and {name} is of kind: "
            "megatron, whose layers are Megatron-Core's; leave compile out"
        )
    if isinstance(strategy, Fsdp2Config) and strategy.tp > 1:
        yield (
            f"{where}.compile: {name}.strategy.tp gives each rank a part of every matrix of a "
            "layer, and such layers are not compiled; leave compile out, or use ulysses"
        )
    if isinstance(strategy, Fsdp2Config) and strategy.ep > 1:
        yield (
            f"{where}.compile: with {name}.strategy.ep ranks exchange tokens inside of a layer, "
            "and such layers are not compiled; leave one of the two out"
        )


def _in_transformers(config: RunConfig, model: ModelConfig) -> bool:
    """Return True if some role runs this model as a Hugging Face model."""
    others = [
        role.model or config.train_model
        for role in config.computing.values()
        if not isinstance(role.strategy, MegatronConfig)
    ]
    infer = config.roles.get(Role.ACTOR_INFER)
    if infer is not None and isinstance(infer.strategy, HfEngineConfig):
        others.append(config.train_model)
    return any(other.path == model.path for other in others)


def _optimizers(config: RunConfig) -> Iterator[str]:
    """Yield kinds of optimizers that a role's backend does not train with."""
    for name, role in config.trained.items():
        problem = optimizer_problem(role.strategy.kind, role.optimizer)
        if problem is not None:
            yield f"{name}.optimizer.kind: {problem}"


def _schedule(config: RunConfig) -> Iterator[str]:
    """Yield settings of a schedule that contradict each other, that have no effect, or for which
    the run has too few optimizer steps."""
    for name, role in config.trained.items():
        key, total = f"{name}.optimizer", max(config.total_updates(name), 1)
        yield from _idle_keys(role.optimizer, key)
        yield from _too_few_steps(role.optimizer, key, total)


def _idle_keys(optimizer: OptimizerBase, key: str) -> Iterator[str]:
    """Yield what is said twice, or does nothing with this schedule."""
    schedule = optimizer.schedule
    if optimizer.warmup_ratio and optimizer.warmup_steps:
        yield (
            f"{key}.warmup_ratio: the warm-up has a number of steps already "
            f"({key}.warmup_steps: {optimizer.warmup_steps}); drop one of the two"
        )
    if optimizer.changed("decay_ratio") and schedule != "wsd":
        yield f"{key}.decay_ratio: concerns schedule=wsd, and this is {schedule}; drop it"
    if optimizer.changed("min_lr_ratio") and schedule == "constant":
        yield f"{key}.min_lr_ratio: schedule=constant does not decay; drop it, or name a schedule"


def _too_few_steps(optimizer: OptimizerBase, key: str, total: int) -> Iterator[str]:
    """Yield a warm-up that leaves none of the run's `total` optimizer steps for the decay, or a
    decay that begins before the warm-up ends."""
    warmup, schedule = optimizer.warmup(total), optimizer.schedule
    name = "warmup_ratio" if optimizer.warmup_ratio else "warmup_steps"
    if schedule != "constant" and warmup >= total:
        yield (
            f"{key}.{name}: {warmup} steps of warm-up leave none of the run's {total} optimizer "
            f"steps for the {schedule} decay; use at most {total - 1}, or schedule=constant"
        )
    elif schedule == "wsd" and warmup + optimizer.decay(total) > total - 1:
        yield (
            f"{key}.decay_ratio: {optimizer.decay(total)} steps of decay after {warmup} of warm-up "
            f"do not fit into the run's {total} optimizer steps, of which one is at the peak; "
            "lower one of the two"
        )


def _checkpoint(config: RunConfig) -> Iterator[str]:
    """Yield a missing `best_metric`, metrics that no validation makes, and a `keep_best` for which
    no checkpoint is validated in time."""
    checkpoint = config.checkpoint
    if checkpoint.keep_best and checkpoint.best_metric is None:
        yield "checkpoint.best_metric: must be set when keep_best is above 0"
    if checkpoint.higher_is_better is not None and checkpoint.best_metric is None:
        yield "checkpoint.higher_is_better: is for best_metric, and there is none; drop it"
    yield from _unknown_metric(config, "checkpoint.best_metric", checkpoint.best_metric)
    if config.validation.stop is not None:
        yield from _unknown_metric(config, "validation.stop.metric", config.validation.stop.metric)
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


def _unknown_metric(config: RunConfig, key: str, metric: str | None) -> Iterator[str]:
    """Yield a metric that no validation of the run makes."""
    known = config.validation.metrics
    if metric is not None and metric not in known:
        yield (
            f"{key}: no validation makes {metric!r}{nearest(metric, known)} "
            f"(known: {', '.join(known) or 'none, validation.sets is empty'})"
        )


def _frozen(config: RunConfig) -> Iterator[str]:
    """Yield options of a frozen model's backend that were set but have no effect."""
    # Compared with the defaults, not with the keys that were set: a resolved config sets every key
    # and must still be accepted.
    for key, role in config.computing.items():
        strategy = role.strategy
        if isinstance(role, LearnerRole) or isinstance(strategy, HfScoreConfig):
            continue
        defaults = type(strategy)()
        for name in _BACKWARD_ONLY[strategy.kind]:
            if getattr(strategy, name) != getattr(defaults, name):
                yield (
                    f"{key}.strategy.{name}: concerns the backward pass, which a frozen "
                    "model does not have; drop it"
                )


def weighted_set_problems(sets: Mapping[str, FileConfig]) -> Iterator[str]:
    """Yield validation sets with a weight: each is validated whole."""
    for name, source in sets.items():
        if source.changed("weight"):
            yield (
                f"validation.sets.{name}.weight: all rows of each set are validated, and figures "
                "are those of the set; drop it (`limit` makes a set smaller)"
            )


def nearest_numbers(wanted: int, known: Iterable[int]) -> str:
    """Return the next smaller and the next larger number in `known`, as text: `4 and 8`. There may
    be only one, or none (an empty text)."""
    sorted_known = sorted(known)
    below = [n for n in sorted_known if n < wanted][-1:]
    above = [n for n in sorted_known if n > wanted][:1]
    return " and ".join(str(n) for n in below + above)
