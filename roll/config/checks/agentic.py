"""Rules between the parts of an agentic config; see `roll.config.checks.common`."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.agentic_base import AgenticBase
from roll.config.algorithm import Need
from roll.config.checks.common import raise_if_any
from roll.config.checks.corpora import corpus_problems
from roll.config.checks.opponents import opponent_problems
from roll.config.checks.rlvr import policy_problems
from roll.config.errors import nearest


def check_agentic(config: AgenticBase) -> None:
    """Raise one ValueError that names all problems, unless there is none."""
    raise_if_any(
        [
            *policy_problems(config),
            *_environments(config),
            *opponent_problems(config),
            *corpus_problems(config),
            *_tasks(config),
            *_rewards(config),
            *_pairs(config),
        ]
    )


def _pairs(config: AgenticBase) -> Iterator[str]:
    """Yield a loss that compares two samples: an episode may have several rows."""
    for i, term in enumerate(config.algorithm.loss):
        if term.trains_pairs:
            yield (
                f"algorithm.loss.{i}: {term.kind} compares two responses, and an episode may be "
                "several texts; use another loss, or pipeline: rlvr"
            )


def _environments(config: AgenticBase) -> Iterator[str]:
    """Yield environments in unknown pools, and tags of several environments."""
    owners: dict[str, str] = {}
    for name, environment in config.environments.items():
        pool = environment.pool
        if pool is not None and pool not in config.pools:
            known = ", ".join(config.pools)
            yield (
                f"environments.{name}.pool: no pool {pool!r}{nearest(pool, config.pools)} "
                f"(pools: {known})"
            )
        for tag in environment.tags:
            if tag in owners:
                yield (
                    f"environments.{name}.tags: tasks with the tag {tag!r} are played in "
                    f"environments.{owners[tag]}; a tag has one environment"
                )
            owners.setdefault(tag, name)


def _tasks(config: AgenticBase) -> Iterator[str]:
    """Yield tags of tasks without an environment, environments without tasks, seeds that are both
    trained on and held out, and settings that concern single turns only."""
    played = {tag for environment in config.environments.values() for tag in environment.tags}
    sources = {f"data.sources.{i}": source for i, source in enumerate(config.data.sources)}
    sources |= {f"validation.sets.{name}": each for name, each in config.validation.sets.items()}
    for key, source in sources.items():
        if source.columns.tag is None and source.tag not in played:
            yield (
                f"{key}.tag: no environment takes the tag {source.tag!r}"
                f"{nearest(source.tag, played)} (tags with one: {', '.join(sorted(played))})"
            )
    # With kept samples the sets of their run are gone, and its environments must stay as they were.
    if config.generates and all(source.columns.tag is None for source in sources.values()):
        used = {source.tag for source in sources.values()}
        for name, environment in config.environments.items():
            if used.isdisjoint(environment.tags):
                yield (
                    f"environments.{name}.tags: no source has one of the tags "
                    f"{', '.join(environment.tags)} (tags of the sources: "
                    f"{', '.join(sorted(used))})"
                )
    if config.data.changed("max_prompt_tokens"):
        yield (
            "data.max_prompt_tokens: an episode has one limit for all that is said in it; set "
            "data.max_episode_tokens"
        )
    for key in config.data.changed("cache", "overlap"):
        yield f"data.{key}: tasks have no tokens before their episodes; drop it"
    if config.data.changed("pictures"):
        yield "data.pictures: episodes have no pictures; drop it"
    if Need.GREEDY_BASELINE in config.needs:
        yield (
            f"algorithm.advantage.kind: {', '.join(config.needs[Need.GREEDY_BASELINE])} compares "
            "with a greedy response, which episodes have not; use another advantage"
        )
    for key, sampling in (config.samplings | config.validation_samplings).items():
        if not sampling.stop_in_text:
            yield f"{key}.stop_in_text: environments read turns as they were written; drop it"
    yield from _held_out(config)
    yield from _players(config)
    yield from _branching(config)
    yield from _several_rows(config)


def _players(config: AgenticBase) -> Iterator[str]:
    """Yield groups that games of several players cannot fill, and validation on such games."""
    for name, environment in config.environments.items():
        seats = environment.seats
        if seats == 1:
            continue
        samples = config.data.samples_per_prompt
        if environment.trained_seats == "all" and samples % seats:
            yield (
                f"data.samples_per_prompt: a game of environments.{name} gives {seats} samples, "
                f"one of each player, and {samples} is no multiple of {seats}; use one"
            )
        for held, source in config.validation.sets.items():
            if source.tag in environment.tags and environment.opponent is None:
                yield (
                    f"validation.sets.{held}.tag: in environments.{name} the policy plays against "
                    "itself, which says nothing of its skill; validate in an environment of one "
                    "player, or against an `opponent`"
                )


def _branching(config: AgenticBase) -> Iterator[str]:
    """Yield groups that leave no episode to branch off."""
    samples = config.data.samples_per_prompt
    for name, environment in config.environments.items():
        branching = environment.branching
        if branching is not None and branching.whole >= samples:
            yield (
                f"environments.{name}.branching.whole: {branching.whole} of "
                f"data.samples_per_prompt = {samples} episodes begin at the beginning, so none is "
                "left to branch off; lower it, or drop `branching`"
            )


def _several_rows(config: AgenticBase) -> Iterator[str]:
    """Yield rewards of tokens that are in several rows: a reward sees the first one."""
    for name, environment in config.environments.items():
        if environment.history == "keep" and environment.rows == "contexts":
            continue
        for reward_name, reward in config.rewards.items():
            if set(environment.tags).isdisjoint(reward.tags):
                continue
            several = f"an episode of environments.{name} has several (`history`, `rows`)"
            if reward.process:
                yield (
                    f"rewards.{reward_name}.process: steps have places in one row of tokens, and "
                    f"{several}; drop `process`"
                )
            if reward.model is not None:
                yield (
                    f"rewards.{reward_name}.model: a reward model reads one row of tokens, and "
                    f"{several}; use a `judge` or a function, which read its text"
                )
            if reward.fn == "length" and reward.kwargs.get("unit", "tokens") == "tokens":
                yield (
                    f"rewards.{reward_name}.kwargs.unit: `tokens` are those of one row, and "
                    f"{several}; count `words`"
                )


def _held_out(config: AgenticBase) -> Iterator[str]:
    """Yield validation sets whose seeds are trained on."""
    for name, held in config.validation.sets.items():
        for i, source in enumerate(config.data.sources):
            if held.seeds is None or source.seeds is None or held.tag != source.tag:
                continue
            first = max(held.first_seed, source.first_seed)
            end = min(held.first_seed + held.seeds, source.first_seed + source.seeds)
            if first < end:
                yield (
                    f"validation.sets.{name}.first_seed: the seeds {first} to {end - 1} are also "
                    f"those of data.sources.{i}; set it to {source.first_seed + source.seeds}"
                )


def _rewards(config: AgenticBase) -> Iterator[str]:
    """Yield tags of rewards that no source has, and an advantage that needs named rewards."""
    for name in config.rewards.keys() & config.environments.keys():
        yield (
            f"rewards.{name}: an environment has this name, too, so the metrics of one would hide "
            "those of the other; rename one"
        )
    sources = (*config.data.sources, *config.validation.sets.values())
    if all(source.columns.tag is None for source in sources):
        used = {source.tag for source in sources}
        for name, reward in config.rewards.items():
            for tag in reward.tags:
                if tag not in used:
                    yield (
                        f"rewards.{name}.tags: no source has the tag {tag!r}{nearest(tag, used)} "
                        f"(tags of the sources: {', '.join(sorted(used))})"
                    )
    for key, advantage in config.advantages.items():
        if advantage.kind == "gdpo":
            yield (
                f"{key}.kind: gdpo normalises each of `rewards` by itself, and the reward of an "
                "environment is none of them; use another advantage"
            )
