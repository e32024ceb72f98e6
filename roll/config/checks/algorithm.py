"""Rules between `algorithm:` and the rest of a config; see `roll.config.checks.common`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from roll.config.algorithm import AdvantageConfig, DistillConfig, GrpoConfig, Need, PassKConfig
from roll.config.checks.common import nearest_numbers, usual_pool
from roll.config.checks.teacher import teacher_problems
from roll.config.rlvr_base import RlvrBase
from roll.config.sections.roles import Role


def algorithm_problems(config: RlvrBase) -> Iterator[str]:
    """Yield the problems of the algorithm, one line each, `key: problem and reason`."""
    yield from _roles(config)
    yield from _follow(config)
    yield from _squared_probs(config)
    yield from _pass_k(config)
    yield from _separate_rewards(config)
    yield from _group_rewards(config)
    yield from _teachers(config)
    yield from _unread_advantages(config)
    yield from _pairs(config)
    yield from _answers(config)


def _roles(config: RlvrBase) -> Iterator[str]:
    """Yield the roles and samples that the algorithm needs but the config lacks, and a role that
    learns beside the policy and that nothing needs."""
    algorithm = config.algorithm
    needs = config.needs
    if Need.REFERENCE in needs and config.reference is None and not config.base_is_reference:
        yield (
            f"reference: {_who(needs, Need.REFERENCE)} needs a `reference` role; add "
            f"`reference: {{pool: {usual_pool(config)}}}`, or train an "
            "adapter (model.lora), whose base is the reference"
        )
    compares = any(term.reads_advantages or term.compares_rewards for term in algorithm.loss)
    if Need.SIBLINGS in needs and compares and config.compared_samples < 2:
        yield (
            f"data.samples_per_prompt: {_who(needs, Need.SIBLINGS)} compares the samples of one "
            f"prompt and needs at least 2{_each_player(config)}; with 1 use "
            "algorithm.advantage.kind=reinforce"
        )
    if Need.CRITIC in needs and config.critic is None:
        yield (
            f"critic: {_who(needs, Need.CRITIC)} needs a `critic` role; add "
            f"`critic: {{pool: {usual_pool(config)}}}`"
        )
    if config.critic is not None and Need.CRITIC not in needs:
        yield (
            f"critic: nothing uses its values; algorithm.advantage.kind is "
            f"{algorithm.advantage.kind}, which has another baseline; drop the role or use gae"
        )
    if Need.PROCESS_REWARD in needs and config.process_reward is None:
        yield (
            f"process_reward: {_who(needs, Need.PROCESS_REWARD)} needs a `process_reward` role; "
            f"add `process_reward: {{pool: {usual_pool(config)}}}`"
        )
    if config.process_reward is not None and Need.PROCESS_REWARD not in needs:
        yield (
            f"process_reward: nothing uses its rewards; algorithm.advantage.kind is "
            f"{algorithm.advantage.kind}, which has none for tokens; drop the role or use prime"
        )
    if config.critic is not None and config.critic.changed("logprob_chunk_tokens"):
        yield "critic.logprob_chunk_tokens: a critic has values and no logits; drop it"
    if config.critic is not None and config.critic.warmup_steps >= config.max_steps:
        yield (
            f"critic.warmup_steps: {config.critic.warmup_steps} leaves the policy none of the "
            f"{config.max_steps} steps"
        )


def _follow(config: RlvrBase) -> Iterator[str]:
    """Yield what is wrong with a reference that follows the policy."""
    follow, backend = config.follow, config.actor_train.strategy.kind
    if follow is None:
        return
    if backend != "fsdp2":
        yield (
            f"reference.follow: {backend} keeps no second copy of the weights; use "
            "actor_train.strategy.kind: fsdp2, or a frozen reference"
        )
    if Need.REFERENCE not in config.needs:
        yield "reference.follow: nothing compares with a reference; drop it"
    if follow.every >= config.max_steps:
        yield (
            f"reference.follow.every: {follow.every} steps are not over before the last of "
            f"max_steps = {config.max_steps}, so the reference would never move; use fewer"
        )


def _squared_probs(config: RlvrBase) -> Iterator[str]:
    """Yield a problem if no forward pass tells the squared probabilities that the algorithm
    needs."""
    if Need.SQUARED_PROBS in config.needs and config.algorithm.old_logprobs == "rollout":
        yield (
            f"algorithm.old_logprobs: {_who(config.needs, Need.SQUARED_PROBS)} needs the policy's "
            "whole distributions, of which the engine reports only the chosen tokens; use auto"
        )


def _pass_k(config: RlvrBase) -> Iterator[str]:
    """Yield a problem if there is only one way to draw k of the samples."""
    samples = config.compared_samples
    for key, advantage in config.advantages.items():
        if isinstance(advantage, PassKConfig) and advantage.k >= samples >= 2:
            yield (
                f"{key}.k: {advantage.k} of {samples} samples per prompt{_each_player(config)} can "
                "be drawn in one way only, which leaves nothing to compare; use a k below data."
                "samples_per_prompt"
            )


def _each_player(config: RlvrBase) -> str:
    """Return, for a message, that samples of one player are meant if there are several players."""
    return " of each player" if config.compared_samples < config.data.samples_per_prompt else ""


def _separate_rewards(config: RlvrBase) -> Iterator[str]:
    """Yield settings that change the total reward, where an advantage does not use it."""
    told = set[str]()
    for advantage, place, parts in config.shaped_advantages:
        why = _without_total(advantage)
        kl = config.algorithm.kl_in_reward is not None
        for key, there in ((place, bool(parts)), ("algorithm.kl_in_reward", kl)):
            if why and there and key not in told:  # several tags have it from the run
                told.add(key)
                yield f"{key}: {why}; drop it, or use another advantage"
    for key, tags in config.step_rewards.items():
        reasons = filter(None, (_without_total(config.advantage_of(tag)) for tag in tags))
        for why in itertools.islice(reasons, 1):
            yield f"{key}: {why}; drop it, or use another advantage"


def _without_total(advantage: AdvantageConfig) -> str | None:
    """Return why an advantage does not use the total reward of a sample; None if it does."""
    if advantage.kind == "gdpo":
        return "gdpo normalises each reward by itself and never sees their total"
    if isinstance(advantage, DistillConfig) and not advantage.mix:
        return "distill with mix = 0 learns from teachers alone and reads no rewards"
    return None


def _group_rewards(config: RlvrBase) -> Iterator[str]:
    """Yield rewards that see all samples of a prompt where a greedy response, which is none of
    these, needs a reward too."""
    needs = config.needs
    if Need.GREEDY_BASELINE not in needs:
        return
    for name, reward in config.rewards.items():
        if reward.per == "group" and any(map(config.needs_greedy, reward.tags)):
            yield (
                f"rewards.{name}.per: group rewards do not see the greedy response, with which "
                f"{_who(needs, Need.GREEDY_BASELINE)} compares; use "
                "another advantage"
            )


def _unread_advantages(config: RlvrBase) -> Iterator[str]:
    """Yield settings that change only advantages, if no loss term uses advantages."""
    algorithm = config.algorithm
    if any(term.reads_advantages for term in algorithm.loss):
        return
    terms = " and ".join(term.kind for term in algorithm.loss)
    compares = any(term.compares_rewards for term in algorithm.loss)
    shapings = {} if compares else config.reward_shapings
    for key, there in (
        ("critic", config.critic is not None),
        ("process_reward", config.process_reward is not None),
        *((key, bool(parts)) for key, parts in shapings.items()),
        ("algorithm.advantage", algorithm.advantage.kind != GrpoConfig().kind),
        *((f"domains.{tag}.advantage", bool(d.advantage)) for tag, d in config.domains.items()),
        *((key, not compares) for key in config.step_rewards),
        ("algorithm.advantage_shaping", bool(algorithm.advantage_shaping)),
        ("algorithm.kl_in_reward", algorithm.kl_in_reward is not None),
    ):
        if there:
            yield f"{key}: changes advantages, which {terms} does not read; drop it"


def _pairs(config: RlvrBase) -> Iterator[str]:
    """Yield numbers of prompts whose pairs do not divide over updates and ranks; nothing if a pool
    is unknown."""
    if not config.algorithm.trains_pairs or any(
        pool not in config.pools for pool in config.role_pools.values()
    ):
        return
    if config.algorithm.trains_answers:  # a pair for each sample: `_batch` has looked at these
        return
    prompts, updates = config.data.prompts_per_step, config.updates_per_pass()
    ranks = config.num_parts(Role.ACTOR_TRAIN)
    # The reference scores single rows.
    scored = 1 if config.reference_role is None else config.num_parts(Role.REFERENCE)
    unit = math.lcm(updates * ranks, scored // math.gcd(scored, 2))
    if prompts % unit:
        near = nearest_numbers(prompts, range(unit, prompts + 2 * unit, unit))
        yield (
            f"data.prompts_per_step: each of the {prompts} prompts gives one pair, and these do "
            f"not divide over {updates} update(s) on {ranks} rank(s), and their rows over {scored} "
            f"part(s) of the reference; nearest that do: {near}"
        )


def _answers(config: RlvrBase) -> Iterator[str]:
    """Yield what a loss on the answers of the data set cannot do with."""
    algorithm = config.algorithm
    if not algorithm.trains_answers:
        return
    kind = next(term.kind for term in algorithm.loss if term.trains_answers)
    for i, source in enumerate(config.data.sources):
        if source.columns.answer is None:
            yield (
                f"data.sources.{i}.columns.answer: {kind} learns from the answers of the rows; "
                "name their column"
            )
    if not config.generates:
        yield f"rollout.replay: {kind} compares the policy with its own responses; generate them"
    if algorithm.old_logprobs == "rollout":
        yield (
            "algorithm.old_logprobs: the engine has no log-probs of the data set's answers, which "
            f"{kind} compares; use auto"
        )
    if config.rollout.max_staleness:
        yield (
            f"rollout.max_staleness: {kind} takes the policy before the step for the one that "
            "wrote its responses; use 0"
        )
    if config.teachers:
        yield f"teachers: give no outputs for the data set's answers, which {kind} trains on"


def _teachers(config: RlvrBase) -> Iterator[str]:
    """Yield a problem if teachers are missing or not used, or their tags do not give each sample
    one teacher."""
    wanted = config.needs.get(Need.TEACHER)
    if wanted is None:
        if config.teachers:
            yield (
                f"teachers: nothing uses them; algorithm.advantage.kind is "
                f"{config.algorithm.advantage.kind} and no loss term is distill; drop them, or use "
                "distill as the one or the other"
            )
        return
    if not config.teachers:
        yield (
            f"teachers: {' and '.join(wanted)} needs at least one; add "
            f"`teachers: {{NAME: {{pool: {usual_pool(config)}, model: {{path: FOLDER}}}}}}`"
        )
        return
    sources = {f"data.sources.{i}": source for i, source in enumerate(config.data.sources)}
    yield from teacher_problems(config.teachers, sources)


def _who(needs: Mapping[Need, list[str]], need: Need) -> str:
    """Return the parts that have `need`, a key of `needs`, as text: `grpo and kl_in_reward`."""
    return " and ".join(needs[need])
