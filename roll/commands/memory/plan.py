"""Memory that each role of a run needs on each of its devices, and that of a device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

from roll.commands.memory.engines import Requests, served
from roll.commands.memory.formula import copied_states, on_its_device, scored, trained
from roll.commands.memory.needs import Needs, Passes
from roll.commands.memory.sizes import ModelSizes, learned, sizes_of
from roll.config.agentic_base import AgenticBase
from roll.config.errors import ConfigError
from roll.config.offline import RewardModelConfig
from roll.config.offline_base import OfflineConfig
from roll.config.rlvr_base import RlvrBase
from roll.config.run import RunConfig
from roll.config.sections.engines import SglangConfig, VllmConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.placement import parse_devices
from roll.config.sections.roles import Role
from roll.config.sections.services.judge import ClusterJudgeConfig
from roll.config.sections.services.opponent import OpponentConfig
from roll.config.sections.strategy import (
    DeepspeedConfig,
    HfScoreConfig,
    MegatronConfig,
    TrainStrategyConfig,
)
from roll.config.sections.training import InferRole, LearnerRole, ScoreRole, TeacherRole
from roll.config.step_plan import rows_together, sequences_of, trained_rows
from roll.distributed.device_layout import address_to_join
from roll.platform.machine import GIB, count_gpus, gpu_memory_gb, memory_gb

DEFAULT_BUCKET_MB = 32
MAY_BE_OFF = 0.15
"""Part by which an estimate may be too high; a run that might fit is not refused."""
_WIDTHS = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a run, as far as their memory is concerned."""

    platform: str
    """`cpu` or `cuda`."""
    memory: float | None
    """Bytes of each GPU, or of each machine if there are no GPUs; None: not known."""
    per_node: int
    """Devices of a machine; without GPUs they share its memory."""


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """A role, its devices and what it needs of each."""

    role: str
    devices: tuple[int, ...]
    needs: Needs


def devices_of(config: RunConfig, environ: Mapping[str, str]) -> Devices:
    """Return the devices of a run: those of the config, or else those of this machine, unless the
    run joins a cluster."""
    cluster = config.cluster
    here = address_to_join(cluster, environ) is None
    platform = cluster.platform
    if platform == "auto":
        # Nothing here tells what a cluster has; one that is worth joining has GPUs.
        platform = "cpu" if here and not count_gpus() else "cuda"
    memory = cluster.memory_gb
    if memory is None and here:
        memory = gpu_memory_gb() if platform == "cuda" else memory_gb()
    highest = max(max(parse_devices(pool)) for pool in config.pools.values())
    per_node = cluster.devices_per_node or ceil((highest + 1) / cluster.nodes)
    return Devices(platform, None if memory is None else memory * GIB, per_node)


def of_roles(config: RunConfig, devices: Devices) -> tuple[list[RoleMemory], list[str]]:
    """Return what every role needs, and the names of the models that are not known here."""
    found, unknown = [], []
    for name, role in config.roles.items():
        model = _model_of(config, name)
        sizes = sizes_of(model, scores=_scores(config, name))
        if sizes is None:
            unknown.append(model.path)
            continue
        if isinstance(role, InferRole):
            width = _WIDTHS[role.dtype or model.dtype]
            memory = devices.memory if devices.platform == "cuda" else None
            requests = Requests(_sequence_tokens(config, name), width)
            needs = served(sizes, role.strategy, requests, memory)
        else:
            if devices.platform == "cpu":
                kept = on_its_device(role.strategy)
                role = role.model_copy(update={"strategy": kept})
            needs = _computing(config, name, role, model, sizes)
        found.append(RoleMemory(name, parse_devices(config.pools[role.pool]), needs))
    for name, pool, model, tokens in _beside_roles(config):
        sizes = sizes_of(model, scores=True)  # encoders have no output layer, either
        if sizes is None:
            unknown.append(model.path)
            continue
        passes = Passes(tokens, chunk_tokens=0, ranks=1, width=_WIDTHS[model.dtype])
        devices_of_pool = parse_devices(config.pools[pool])
        found.append(RoleMemory(name, devices_of_pool, scored(sizes, HfScoreConfig(), passes)))
    return found, list(dict.fromkeys(unknown))


def _scores(config: RunConfig, name: str) -> bool:
    """Return whether a role's model has one output per token in place of logits."""
    of_pairs = isinstance(config, RewardModelConfig) and name == Role.ACTOR_TRAIN
    return of_pairs or name == Role.CRITIC


def _beside_roles(config: RunConfig) -> Iterator[tuple[str, str, ModelConfig, int]]:
    """Yield name, pool and model of the reward models and of the encoders of corpora, which are no
    roles, and the tokens of a forward pass."""
    if not isinstance(config, RlvrBase) or not config.generates:
        return
    for name, reward in config.rewards.items():
        if reward.model is not None:
            longest = config.max_sequence_tokens
            tokens = max(reward.max_tokens_per_microbatch, longest)
            most = min(tokens, config.samples_per_step * longest)
            yield f"rewards.{name}", reward.pool or config.actor_infer.pool, reward.model, most
    for name, corpus in config.corpora.items() if isinstance(config, AgenticBase) else ():
        yield f"corpora.{name}", corpus.pool, corpus.model, corpus.batch * corpus.max_tokens


def _computing(
    config: RunConfig,
    name: str,
    role: LearnerRole | ScoreRole,
    model: ModelConfig,
    sizes: ModelSizes,
) -> Needs:
    """Return what a role that trains or scores needs."""
    rows, longest = _rows(config, name)
    together = rows_together(config, name)
    budget = max(role.max_tokens_per_microbatch, together * longest)
    at_once = budget // (together * longest) * together
    passes = Passes(
        tokens=min(budget, rows * longest),
        chunk_tokens=role.logprob_chunk_tokens,
        ranks=config.num_devices(name),
        width=_WIDTHS[model.dtype],
        micro_batches=ceil(rows / at_once),
        tells_states=isinstance(role, TeacherRole) and _tell_distributions(config),
    )
    if isinstance(role, ScoreRole):
        return scored(sizes, role.strategy, passes)
    needs = trained(sizes, role.strategy, passes, learned(model, sizes), role.optimizer)
    reference = 0
    if name == Role.ACTOR_TRAIN and isinstance(config, RlvrBase) and config.follow is not None:
        # It is a copy of what has gradients, in the same dtype and shards.
        reference = needs.gradients
        needs = replace(needs, weights=needs.weights + reference)
    if config.checkpoint.asynchronous:
        kept = role.optimizer if config.checkpoint.optimizer else None
        own = copied_states(sizes, role.strategy, passes.ranks, learned(model, sizes), kept)
        needs = replace(needs, copied=own + reference)
    return needs


def _tell_distributions(config: RunConfig) -> bool:
    """Return whether the run's teachers tell whole distributions, not log-probs of tokens alone."""
    return not isinstance(config, RlvrBase) or config.algorithm.distill_target is not None


def _rows(config: RunConfig, name: str) -> tuple[int, int]:
    """Return how many rows a rank gets at once, and the tokens of the longest."""
    parts = config.num_parts(name)
    if isinstance(config, RlvrBase):
        role = Role(name) if name in config.trained else None
        samples = config.samples_per_step if role is None else config.samples_per_update(role)
        rows = trained_rows(config, samples, name)
        return max(rows_together(config, name), rows // parts), config.max_row_tokens
    assert isinstance(config, OfflineConfig)
    rows = config.data.rows_per_step * sequences_of(config) // parts
    return max(rows_together(config, name), rows), config.data.max_tokens


def _model_of(config: RunConfig, name: str) -> ModelConfig:
    """Return the model of a role."""
    role = config.roles[name]
    if isinstance(role, ClusterJudgeConfig | OpponentConfig) and role.model is not None:
        return role.model
    if isinstance(role, LearnerRole | ScoreRole) and role.model is not None:
        return role.model
    return config.train_model


def _sequence_tokens(config: RunConfig, name: str) -> int:
    """Return the largest number of tokens of a request to the engines of a role."""
    assert isinstance(config, RlvrBase)
    if name.startswith("judges."):
        return config.judge_tokens(name.removeprefix("judges."))
    return config.max_sequence_tokens


def of_devices(
    config: RunConfig, roles: list[RoleMemory], platform: str
) -> dict[int, dict[str, int]]:
    """Return, for each device, what is on it at the worst moment: bytes by role.

    On GPUs roles that share a device take turns, or are there beside each other, as
    `cluster.colocate` says. Without GPUs nothing moves, so all roles are there.
    """
    found = {}
    for device, own in on_devices(roles).items():
        if platform == "cpu":
            found[device] = {role: needs.total + needs.copied for role, needs in own.items()}
        else:
            worst = in_turns if config.cluster.colocate == "turns" else beside
            found[device] = worst(config, own)
    return found


def on_devices(roles: list[RoleMemory]) -> dict[int, dict[str, Needs]]:
    """Return the roles of each device, in the order of the devices, and what each needs there."""
    devices = sorted({each for role in roles for each in role.devices})
    return {at: {each.role: each.needs for each in roles if at in each.devices} for at in devices}


def in_turns(config: RunConfig, own: Mapping[str, Needs]) -> dict[str, int]:
    """Return what is on a GPU at the worst moment if its roles take turns.

    What works while the policy's engines generate is there with them, and a push of weights has the
    trainer and the engines there together.
    """
    together = {r: needs.total for r, needs in own.items() if r.startswith(_WITH_ENGINES)}
    moments = [{role: needs.total} for role, needs in own.items() if role not in together]
    moments += [together] if together else []
    moments += _push(config, own, {role: needs.weights for role, needs in own.items()})
    return max(moments, key=lambda moment: sum(moment.values()))


def beside(config: RunConfig, own: Mapping[str, Needs]) -> dict[str, int]:
    """Return what is on a GPU at the worst moment if its roles stay there beside each other. A
    process keeps what it has needed once: PyTorch does not give it back by itself."""
    all_there = {role: needs.total for role, needs in own.items()}
    pushes = [{**all_there, **moment} for moment in _push(config, own, all_there)]
    return max([all_there, *pushes], key=lambda moment: sum(moment.values()))


_WITH_ENGINES = (Role.ACTOR_INFER, "opponents.", "judges.", "rewards.", "corpora.")
"""Beginnings of the names of what is on its devices while the policy's engines generate."""


def _push(
    config: RunConfig, own: Mapping[str, Needs], there: Mapping[str, int]
) -> Iterator[dict[str, int]]:
    """Yield what trainer and engines have on a device during a push, if they share it.

    Args:
        there: what each role has on it then, if it is an engine.
    """
    if not isinstance(config, RlvrBase) or Role.ACTOR_TRAIN not in own:
        return
    engines = {name: there[name] for name in _pushed_to(config) if name in own}
    if engines:
        bucket = (config.weight_sync.bucket_mb or DEFAULT_BUCKET_MB) * 2**20
        trainer = own[Role.ACTOR_TRAIN].resident
        if _keeps_gradients(config.actor_train.strategy, config.train_model.dtype):
            trainer += own[Role.ACTOR_TRAIN].gradients
        yield {Role.ACTOR_TRAIN: trainer, **engines, "buckets": 2 * bucket}


def _keeps_gradients(strategy: TrainStrategyConfig, dtype: str) -> bool:
    """Return whether a trainer has buffers for gradients that it never frees."""
    if isinstance(strategy, DeepspeedConfig):
        return strategy.stage == 3 or (strategy.stage <= 1 and dtype == "bfloat16")
    return isinstance(strategy, MegatronConfig)


def _pushed_to(config: RlvrBase) -> Collection[str]:
    """Return the names of the engines that get the policy's weights."""
    opponents = config.opponents.items() if isinstance(config, AgenticBase) else ()
    return [
        Role.ACTOR_INFER,
        *(f"opponents.{name}" for name, one in opponents if one.every is not None),
    ]


def check_fit(config: RunConfig, devices: Devices) -> None:
    """Raise ConfigError if a device cannot hold what its roles need, by more than `MAY_BE_OFF`, or
    if what engines need beside other roles is not said.

    Nothing else is checked if its memory is not known. Roles whose models are not known here count
    as nothing.
    """
    if devices.platform == "cuda" and config.cluster.colocate == "beside":
        check_engines_beside(config)
    if devices.memory is None:
        return
    roles, _ = of_roles(config, devices)
    wrong = []
    for place, moment in _places(config, roles, devices).items():
        need = sum(moment.values())
        share, why = _usable(config, moment) if devices.platform == "cuda" else (1.0, "")
        if need * (1 - MAY_BE_OFF) > share * devices.memory:
            parts = ", ".join(f"{role} {gib(size)}" for role, size in moment.items())
            has = gib(share * devices.memory)
            wrong.append(f"{place} needs about {gib(need)} GiB ({parts}), but has {has}{why}")
    if wrong:
        more = f"; so it is with {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ConfigError(
            f"{wrong[0]}{more}. {_to_make_room(config, devices)}Give the pool more devices, shard "
            "more (fsdp2, deepspeed stage 3, megatron tp or pp), lower max_tokens_per_microbatch, "
            "or compute activations again in the backward pass (activation_checkpointing, "
            "recompute) and keep less of them on the GPU (offload_activations)"
        )


def _usable(config: RunConfig, names: Iterable[str]) -> tuple[float, str]:
    """Return the share of a GPU that roles beside each other may use, and why it is not all: what
    all processes use counts for SGLang's share. It is all if roles take turns."""
    roles = {name: role for name, role in config.roles.items() if name in names}
    shares = {
        name: role.strategy.gpu_memory_utilization
        for name, role in roles.items()
        if isinstance(role.strategy, SglangConfig) and config.cluster.colocate == "beside"
    }
    if len(roles) < 2 or not shares:
        return 1.0, ""
    least = min(shares, key=shares.__getitem__)
    key = f"{least}.strategy.gpu_memory_utilization"
    return shares[least], f" ({key}={shares[least]:g}, in which SGLang counts all roles)"


def _to_make_room(config: RunConfig, devices: Devices) -> str:
    """Return what makes room for roles that stay beside each other; empty if they take turns."""
    if devices.platform == "cpu" or config.cluster.colocate == "turns":
        return ""
    return (
        "The roles are there beside each other: let them take turns (cluster.colocate: turns), or "
        "give engines a smaller KV cache (kv_cache_gb, kv_cache_tokens). "
    )


def check_engines_beside(config: RunConfig) -> None:
    """Raise ConfigError for settings of engines that stay on GPUs beside other roles and do not say
    how much they take: when an engine starts anew, a share of the GPU is what others leave."""
    places = {name: set(parse_devices(config.pools[pool])) for name, pool in _pools_of(config)}
    wrong = []
    for name, role in config.roles.items():
        others = (own for other, own in places.items() if other != name)
        if not isinstance(role, InferRole) or not any(own & places[name] for own in others):
            continue
        strategy, at = role.strategy, f"{name}.strategy"
        if isinstance(strategy, VllmConfig) and strategy.kv_cache_gb is None:
            wrong.append(f"{at}.kv_cache_gb: set it")
        if isinstance(strategy, SglangConfig) and strategy.kv_cache_tokens is None:
            wrong.append(f"{at}.kv_cache_tokens: set it")
        if isinstance(strategy, VllmConfig) and strategy.sleep_level == 2:
            wrong.append(f"{at}.sleep_level: drop it, as the engine does not sleep")
    if wrong:
        raise ConfigError(
            f"{'; '.join(wrong)}. With cluster.colocate=beside an engine stays on its GPUs beside "
            "other roles, so its KV cache needs a size: a share of the GPU would depend on what "
            "they use when it starts"
        )


def _pools_of(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the name of everything that computes with a model on a pool, and the pool."""
    yield from config.role_pools.items()
    yield from ((name, pool) for name, pool, _, _ in _beside_roles(config))


def _places(
    config: RunConfig, roles: list[RoleMemory], devices: Devices
) -> dict[str, dict[str, int]]:
    """Return bytes by role for each memory: that of a GPU, or of a machine without GPUs."""
    on_devices = of_devices(config, roles, devices.platform)
    if devices.platform == "cuda":
        return {f"device {device}": moment for device, moment in on_devices.items()}
    found: dict[str, dict[str, int]] = {}
    for device, moment in on_devices.items():
        place = found.setdefault(f"machine {device // devices.per_node}", {})
        for role, size in moment.items():
            place[role] = place.get(role, 0) + size
    return found


def gib(size: float) -> str:
    """Return bytes in GiB, as text."""
    return f"{size / GIB:.2f}" if size < 10 * GIB else f"{size / GIB:.0f}"
