"""Rules between the parts of an RLVR config; see `roll.config.checks.common`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from roll.config.agentic_base import AgenticBase
from roll.config.algorithm import Aggregation, DistillConfig, Need
from roll.config.base import Config
from roll.config.checks.adapter import serving_problems
from roll.config.checks.algorithm import algorithm_problems
from roll.config.checks.common import (
    nearest_numbers,
    raise_if_any,
    run_problems,
    weighted_set_problems,
)
from roll.config.checks.domains import domain_problems
from roll.config.checks.rewards import reward_problems
from roll.config.checks.rollout import rollout_problems
from roll.config.checks.shaping import shaping_problems
from roll.config.errors import nearest
from roll.config.rlvr_base import RlvrBase
from roll.config.sections.engines import (
    NO_PICTURES,
    NgramSpeculationConfig,
    SglangConfig,
    VllmConfig,
)
from roll.config.sections.placement import parse_devices, placement_problem
from roll.config.sections.roles import Role
from roll.config.sections.sampling import engine_sampling_problems, trained_sampling_problems
from roll.config.sections.training import InferRole


def check_rlvr(config: RlvrBase) -> None:
    """Raise one ValueError that names all problems, unless there is none."""
    raise_if_any([*policy_problems(config), *_tags(config), *_turns(config), *_pictures(config)])


def _turns(config: RlvrBase) -> Iterator[str]:
    """Yield an algorithm that compares turns of episodes."""
    if Need.TURNS in config.needs:
        yield (
            f"algorithm.advantage.kind: {' and '.join(config.needs[Need.TURNS])} compares turns, "
            "and samples of pipeline: rlvr have one; use another advantage, or pipeline: agentic"
        )


def policy_problems(config: RlvrBase) -> Iterator[str]:
    """Yield the problems of any run in which a policy learns from its own samples."""
    yield from run_problems(config)
    yield from reward_problems(config)
    yield from serving_problems(config)
    yield from _groups(config)
    yield from _batch(config)
    yield from algorithm_problems(config)
    yield from shaping_problems(config)
    yield from _sampling(config)
    yield from domain_problems(config)
    yield from _engines(config)
    yield from weighted_set_problems(config.validation.sets)
    yield from rollout_problems(config)
    yield from _aggregation(config)


def _groups(config: RlvrBase) -> Iterator[str]:
    """Yield engines that cannot have devices of their own on one node, or on whole nodes. Each
    engine takes consecutive devices of its pool."""
    for key, role in config.roles.items():
        if isinstance(role, InferRole) and role.pool in config.pools:
            yield from _groups_of(config, key, role)


def _groups_of(config: RlvrBase, key: str, infer: InferRole) -> Iterator[str]:
    """Yield engines of one role that cannot have devices of their own where these are."""
    devices = parse_devices(config.pools[infer.pool])
    size = infer.devices_per_worker
    if len(devices) % size:
        yield (
            f"{key}.strategy.tp: a replica's {size} devices do not divide the "
            f"{len(devices)} devices of pool {infer.pool!r}"
        )
        return
    per_node = config.cluster.devices_per_node
    if per_node is None:
        return
    for start in range(0, len(devices), size):
        group = devices[start : start + size]
        spans = isinstance(infer.strategy, VllmConfig)
        problem = placement_problem(group, per_node, several_nodes=spans)
        if problem is not None:
            yield f"{key}.strategy.tp: {problem}"


def _batch(config: RlvrBase) -> Iterator[str]:
    """Yield batches that do not divide over updates or ranks, with the nearest that do; nothing if
    a pool is unknown."""
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
            # No size of an update could divide these samples.
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
            yield f"{name}.samples_per_update: {update} {why}; nearest that do: " + nearest_numbers(
                update, known
            )
    reference = config.reference_role
    if reference is not None and samples % config.num_parts(Role.REFERENCE):
        devices = config.num_parts(Role.REFERENCE)
        divisors = [n for n in range(1, samples + 1) if samples % n == 0]
        yield (
            f"reference.pool: the {of_a_step} do not divide over the {devices} devices of pool "
            f"{reference.pool!r}; nearest numbers of devices that do: "
            f"{nearest_numbers(devices, divisors)}"
        )


def _nearest_prompts(config: RlvrBase, ranks: int) -> str:
    """Return the numbers of prompts per step, next below and next above the configured one, whose
    samples divide over the ranks, as text: `4 and 8`."""
    unit = ranks // math.gcd(ranks, config.data.samples_per_prompt)
    wanted = config.data.prompts_per_step
    return nearest_numbers(wanted, range(unit, wanted + 2 * unit, unit))


def _sampling(config: RlvrBase) -> Iterator[str]:
    """Yield settings that the trainer or an engine cannot follow, greedy sampling in training, and
    greedy validation with several samples per prompt."""
    for key, sampling in config.samplings.items():
        if sampling.temperature == 0 and key == "sampling":
            yield f"{key}.temperature: 0 makes all samples of a prompt equal; training needs more"
        elif sampling.top_k == 1 and (key == "sampling" or config.sampling.top_k != 1):
            yield f"{key}.top_k: 1 makes all samples of a prompt equal; raise it, or leave it out"
    yield from trained_sampling_problems("sampling", config.sampling)
    greedy = config.validation_sampling.is_greedy
    if config.validation.sets and greedy and config.validation.samples_per_prompt > 1:
        yield (
            "validation.samples_per_prompt: greedy sampling gives the same sample "
            f"{config.validation.samples_per_prompt} times; use 1 or a temperature above 0"
        )
    told = set[str]()
    for key, sampling in (config.samplings | config.validation_samplings).items():
        for role, player in config.players.items():
            for problem in engine_sampling_problems(key, sampling, role, player.strategy):
                if (same := problem.replace(key, "")) not in told:  # a tag has it from the run
                    told.add(same)
                    yield problem


def _pictures(config: RlvrBase) -> Iterator[str]:
    """Yield columns of pictures for an engine that takes none. Pictures in messages are found when
    the rows are read."""
    if not isinstance(config.actor_infer.strategy, SglangConfig):
        return
    sources = {f"data.sources.{i}": source for i, source in enumerate(config.data.sources)}
    sources |= {f"validation.sets.{name}": s for name, s in config.validation.sets.items()}
    for key, source in sources.items():
        if source.columns.images is not None:
            yield f"{key}.columns.images: {NO_PICTURES}"


def _without_rewards(config: RlvrBase) -> Iterator[str]:
    """Yield settings that need rewards, for a config that has none."""
    algorithm = config.algorithm
    for term in algorithm.loss:
        if term.reads_advantages:
            for key, advantage in config.advantages.items():
                if isinstance(advantage, DistillConfig) and not advantage.mix:
                    continue  # only teachers judge the samples
                tag = key.removesuffix(".advantage")
                yield (
                    f"rewards: the loss term {term.kind} follows the advantage {advantage.kind}"
                    f"{'' if tag == 'algorithm' else f' of {tag}'}, which is made of rewards; add "
                    "at least one"
                )
        if term.compares_rewards:
            yield f"rewards: the loss term {term.kind} compares samples by them; add at least one"
    for key, advantage in config.advantages.items():
        if advantage.kind in ("gdpo", "gae"):
            yield f"{key}.kind: {advantage.kind} reads rewards, and there are none"
    readers: dict[str, Sequence[Config]] = {
        **config.reward_shapings,
        **config.filters,
        "algorithm.masks": [c for c in algorithm.masks if c.kind in ("difficulty", "spread")],
        "algorithm.sample_weights": [c for c in algorithm.sample_weights if c.kind == "difficulty"],
    }
    for key, choices in readers.items():
        if choices:
            yield f"{key}: reads rewards, and there are none; add `rewards`, or drop it"
    if config.validation.sets:
        yield "validation.sets: rewards score them, and there are none; add some, or drop the sets"


def _tags(config: RlvrBase) -> Iterator[str]:
    """Yield a problem for each tag of a source that no reward takes, and for each tag of a reward
    that no source has (not checked if a source reads tags from a column). Without rewards, yield
    the settings that need some instead."""
    if not config.rewards:
        yield from _without_rewards(config)
        return
    rewarded = {tag for reward in config.rewards.values() for tag in reward.tags}
    sources = {f"data.sources.{i}": source for i, source in enumerate(config.data.sources)}
    sources |= {f"validation.sets.{name}": s for name, s in config.validation.sets.items()}
    for key, source in sources.items():
        if source.columns.tag is None and source.tag not in rewarded:
            yield (
                f"{key}.tag: no reward takes the tag {source.tag!r}{nearest(source.tag, rewarded)} "
                f"(tags with a reward: {', '.join(sorted(rewarded))})"
            )
    # With kept samples the sets of their run are gone, and its rewards must stay as they were.
    if config.generates and all(source.columns.tag is None for source in sources.values()):
        used = {source.tag for source in sources.values()}
        for name, reward in config.rewards.items():
            for tag in reward.tags:
                if tag not in used:
                    yield (
                        f"rewards.{name}.tags: no source has the tag {tag!r}{nearest(tag, used)} "
                        f"(tags of the sources: {', '.join(sorted(used))})"
                    )


def _engines(config: RlvrBase) -> Iterator[str]:
    """Yield problems of vLLM and SGLang engines of all roles, such as a `max_model_len` below the
    longest sequence; none for other engines."""
    for name, role in config.roles.items():
        strategy = role.strategy
        if not isinstance(role, InferRole) or not isinstance(strategy, VllmConfig | SglangConfig):
            continue
        longest, parts = _longest(config, name)
        if strategy.max_model_len is not None and strategy.max_model_len < longest:
            yield (
                f"{name}.strategy.max_model_len: {strategy.max_model_len} is less than the "
                f"{longest} tokens of {parts}"
            )
        if isinstance(strategy, VllmConfig):
            yield from _vllm(config, name, role, strategy)
    policy = config.roles.get(Role.ACTOR_INFER)
    if policy is not None and isinstance(policy.strategy, VllmConfig):
        yield from _policy_vllm(config, policy.strategy)


def _longest(config: RlvrBase, name: str) -> tuple[int, str]:
    """Return the largest number of tokens of a sequence of the role `name`, and what it is made
    of."""
    group, _, judge = name.partition(".")
    if group == "judges":
        return config.judge_tokens(judge), "max_question_tokens + max_new_tokens"
    made_of = "data.max_prompt_tokens + max_new_tokens"
    if isinstance(config, AgenticBase):
        made_of = "data.max_episode_tokens"
    return config.max_sequence_tokens, made_of


def _vllm(config: RlvrBase, name: str, role: InferRole, strategy: VllmConfig) -> Iterator[str]:
    """Yield vLLM options that exclude each other, quantisation and float32, an n-gram range that
    is empty, and room for adapters in engines that get none."""
    model = config.models.get(f"{name}.model", config.train_model)
    if strategy.quantization is not None and (role.dtype or model.dtype) == "float32":
        yield (
            f"{name}.dtype: vLLM quantises weights of bfloat16 only; set it, or leave out "
            f"{name}.strategy.quantization"
        )
    if isinstance(strategy.speculation, NgramSpeculationConfig):
        low, high = strategy.speculation.min_match, strategy.speculation.max_match
        if low > high:
            yield f"{name}.strategy.speculation.min_match: {low} is more than max_match = {high}"
    if strategy.max_lora_rank and name != Role.ACTOR_INFER:
        yield (
            f"{name}.strategy.max_lora_rank: no adapter is pushed to these engines, so it would "
            "take memory for nothing; drop it"
        )


def _policy_vllm(config: RlvrBase, strategy: VllmConfig) -> Iterator[str]:
    """Yield options of the policy's vLLM that exclude each other: endpoint and adapter,
    quantisation and `verify_weights`, speculation and sampling."""
    if strategy.endpoint is not None and strategy.max_lora_rank:
        yield (
            "actor_infer.strategy.endpoint: requests from outside would be answered without the "
            "adapter; leave out the endpoint, or set max_lora_rank to 0"
        )
    if strategy.quantization is not None and config.track.verify_weights != "never":
        yield (
            "track.verify_weights: a quantised engine does not hold what it was sent; set it to "
            "'never' where actor_infer.strategy.quantization is set"
        )
    if strategy.speculation is None:
        return
    for key, sampling in config.samplings.items():
        if (sampling.temperature, sampling.top_p, sampling.top_k) != (1.0, 1.0, -1):
            yield (
                "actor_infer.strategy.speculation: vLLM then reports log-probs of the unscaled and "
                f"uncut distribution only; set {key}.temperature and {key}.top_p to 1 and "
                f"{key}.top_k to -1, or leave out speculation"
            )


def _aggregation(config: RlvrBase) -> Iterator[str]:
    """Yield a problem if `aggregation_tokens` is set but has no effect."""
    algorithm = config.algorithm
    if (
        algorithm.aggregation_tokens is not None
        and algorithm.aggregation is not Aggregation.CONSTANT
    ):
        yield (
            "algorithm.aggregation_tokens: only `constant` aggregation divides by it, "
            f"algorithm.aggregation is {algorithm.aggregation.value}; drop one or change the other"
        )
