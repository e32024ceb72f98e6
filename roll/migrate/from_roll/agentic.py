"""Agentic runs of ROLL: environments by tag, and the groups that are played in them."""

from __future__ import annotations

import re
from typing import Any

from roll.migrate.from_roll.engines import put_sampling
from roll.migrate.from_roll.rlvr import actors, policy
from roll.migrate.job import Job

ENVS = (
    (r"sokoban", "sokoban"),
    (r"frozen_?lake", "frozen_lake"),
)
"""Built-in environment for an `env_type` or a tag that the pattern finds."""
GEM = re.compile(r"(game|rg|math|code|qa|eval|logic):.+")
STAND_IN = "http://127.0.0.1:8001"
"""Address of the server that must play an environment without a counterpart."""
SEEDS = 10_000
"""Number of tasks made of seeds; ROLL draws new seeds in each step."""
HELD_OUT = 1_000_000
"""First seed of validation."""


def translate(job: Job) -> None:
    """Translate the file of an agentic run."""
    train, infer = actors(job)
    if job.count("max_steps", "max_steps") is None:
        job.put("max_steps", 500)
    group = job.keys.whole("train_env_manager.group_size") or 1
    job.put("data.samples_per_prompt", group, "train_env_manager.group_size")
    episodes = job.keys.whole("rollout_batch_size")
    if episodes is None:
        episodes = (job.keys.whole("train_env_manager.num_env_groups") or 16) * group
    note = f"{episodes} episodes in groups of {group}"
    job.put("data.prompts_per_step", max(1, episodes // group), "rollout_batch_size", note=note)
    job.why("train_env_manager.num_env_groups", "as many groups are played as a step needs")
    row = job.keys.whole("sequence_length") or _sum_of_lengths(job)
    keys = ("sequence_length", "prompt_length", "response_length")
    job.put("data.max_episode_tokens", max(2, row), *keys)
    redundant = job.keys.whole("train_env_manager.group_size_redundancy")
    if redundant:
        job.put("rollout.redundant_samples", redundant, "train_env_manager.group_size_redundancy")
        job.put("rollout.siblings", "separate", note="redundant samples need it")
    args = f"{infer}.generating_args"
    turn = job.keys.whole(f"{args}.max_new_tokens") or job.keys.whole("max_tokens_per_step")
    put_sampling(job, args, "sampling", "max_tokens_per_step", turn or min(row, 1024))
    policy(job, train, infer, row, _tags(job, "train"))
    if redundant:
        job.put("rollout.siblings", "separate", "is_num_return_sequences_expand")
    _put_environments(job)
    _put_tasks(job)
    job.why("reward", "write the reward of an episode as one of `rewards`, or in its environment")
    job.why("rewards", "write them as `rewards` of the tags of the environments")


def _sum_of_lengths(job: Job) -> int:
    """Return the tokens of an episode from those of prompt and response."""
    prompt, response = (job.keys.whole(f"{each}_length") for each in ("prompt", "response"))
    return (prompt or 1024) + (response or 3072)


def _tags(job: Job, which: str) -> list[str]:
    """Return the tags of an env manager, `train` or `val`."""
    return list(dict.fromkeys(job.keys.texts(f"{which}_env_manager.tags")))


def _played(job: Job) -> list[str]:
    """Return the tags of all tasks, of training first; those of the environments, or one to be
    named, if no manager names any."""
    told = dict.fromkeys([*_tags(job, "train"), *_tags(job, "val")])
    return list(told) or job.keys.names("custom_envs") or ["default"]


def _put_environments(job: Job) -> None:
    """Write an environment for each tag."""
    for tag in _played(job):
        _put_environment(job, tag)


def name_of(tag: str) -> str:
    """Return the name of the environment of a tag."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", tag)


def _put_environment(job: Job, tag: str) -> None:
    """Write the environment of a tag."""
    at, out = f"custom_envs.{tag}", f"environments.{name_of(tag)}"
    key = f"{at}.env_type"
    kind = job.keys.text(key) or tag
    inner = f"{at}.env_config.env_id"
    if GEM.fullmatch(job.keys.text(inner) or "") and "gem" in kind.lower():
        kind, key = job.keys.text(inner) or kind, inner
    name = next((env for pattern, env in ENVS if re.search(pattern, kind.lower())), None)
    if name is not None and not re.search(r"mcp|sandbox|native|tool_call", kind.lower()):
        job.put(f"{out}.env", name, key)
        _put_kwargs(job, at, out, name)
    elif GEM.fullmatch(kind):
        job.put(f"{out}.env", f"gem:{kind}", key, note="needs the package gem-llm")
    else:
        job.put(f"{out}.env", STAND_IN, key)
        job.ask(
            f"environments.{tag}: {kind} has no counterpart; play it behind a server "
            "(docs/environment.openapi.yaml), or name an environment of this framework, or a "
            "class or an agent of your own (docs/agents.md)"
        )
    job.put(f"{out}.tags", [tag], "train_env_manager.tags", "val_env_manager.tags")
    turns = f"{at}.max_steps"
    other = f"{at}.env_config.max_steps"
    job.count(turns if job.keys.has(turns) else other, f"{out}.max_turns")
    if job.keys.whole(other) == job.draft.get(f"{out}.max_turns"):
        job.keys.use(other)
    _put_rows(job, at, out)
    tokens = f"{at}.max_tokens_per_step"
    if job.keys.whole(tokens) == job.draft.get("sampling.max_new_tokens"):
        job.put("sampling.max_new_tokens", job.keys.whole(tokens), *_sampling_keys(job), tokens)
    job.why(tokens, "a turn has sampling.max_new_tokens; of single tags: `domains`")
    instruction = f"{at}.env_config.env_instruction"
    job.why(instruction, "the environment says all that the policy reads")
    whose = name or "behind the server"
    job.why(f"{at}.env_config", f"the environment {whose} has no such setting")


def _sampling_keys(job: Job) -> list[str]:
    """Return the keys that the comment of sampling.max_new_tokens names already."""
    told = job.draft.comment("sampling.max_new_tokens").partition(":")[0]
    return [key for key in told.split(", ") if key != "default"]


def _put_kwargs(job: Job, at: str, out: str, name: str) -> None:
    """Write the arguments of a built-in environment."""
    config = f"{at}.env_config"
    if name == "frozen_lake":
        job.count(f"{config}.size", f"{out}.kwargs.size", low=2)
        job.move(f"{config}.is_slippery", f"{out}.kwargs.slippery", "flag")
        frozen = job.keys.number(f"{config}.p")
        if frozen is not None and 0.2 < frozen <= 1:
            note = "the share of holes, not of ice"
            job.put(f"{out}.kwargs.holes", round(1 - frozen, 6), f"{config}.p", note=note)
        return
    sizes = [job.keys.whole(f"{config}.dim_{axis}") for axis in ("x", "y")]
    if not any(sizes) and isinstance(job.keys.raw(f"{config}.dim_room"), list):
        sizes = [each for each in job.keys.raw(f"{config}.dim_room") if isinstance(each, int)]
    told = [size for size in sizes if size]
    if told:
        note = "" if len(set(told)) == 1 else "boards are square"
        keys = (f"{config}.dim_x", f"{config}.dim_y", f"{config}.dim_room")
        job.put(f"{out}.kwargs.size", max(5, *told), *keys, note=note)
    job.count(f"{config}.num_boxes", f"{out}.kwargs.boxes")


def _put_rows(job: Job, at: str, out: str) -> None:
    """Write the rows that an episode is trained in, by the class of its manager."""
    key = f"{at}.env_manager_cls"
    manager = job.keys.text(key) or ""
    if "VL" in manager:
        job.ask(f"{out}: episodes have no pictures here")
        job.why(key, "episodes have no pictures here")
    elif "Step" in manager:
        job.put(f"{out}.rows", "turns", key)
    elif "TrajEnvManager" in manager:
        job.put(f"{out}.rows", "contexts", key)
    else:
        job.why(key, "an `agent` may be any program that asks an endpoint (docs/agents.md)")


def _put_tasks(job: Job) -> None:
    """Write the tasks of training and validation: seeds, or a file where a server plays."""
    tags = _tags(job, "train") or _played(job)
    key = "train_env_manager.num_groups_partition"
    shares = job.keys.raw(key)
    fits = isinstance(shares, list) and len(shares) == len(tags)
    sources = []
    for i, tag in enumerate(tags):
        source = _task(job, tag, SEEDS, 0)
        if fits and len(tags) > 1 and isinstance(shares[i], int | float) and shares[i] > 0:
            source["weight"] = float(shares[i])
        sources.append(source)
    job.put("data.sources", sources, "train_env_manager.tags", *([key] if fits else []))
    held = _tags(job, "val")
    if not held:
        job.why("eval_steps", "there is no validation set")
        return
    key = "val_env_manager.num_groups_partition"
    shares = job.keys.raw(key)
    fits = isinstance(shares, list) and len(shares) == len(held)
    each = max(1, (job.keys.whole("val_env_manager.num_env_groups") or 128) // len(held))
    sets: dict[str, Any] = {}
    for i, tag in enumerate(held):
        count = shares[i] if fits and isinstance(shares[i], int) and shares[i] > 0 else each
        sets[tag] = _task(job, tag, count, HELD_OUT)
    job.put("validation.sets", sets, "val_env_manager.tags", key, "val_env_manager.num_env_groups")
    job.count("eval_steps", "validation.every")
    size = "val_env_manager.group_size"
    temperature = job.draft.get("sampling.temperature")
    if temperature:
        job.count(size, "validation.samples_per_prompt")
    job.why(size, "greedy sampling plays the same episode each time")


def _task(job: Job, tag: str, seeds: int, first: int) -> dict[str, Any]:
    """Return a source of tasks for a tag."""
    if job.draft.get(f"environments.{name_of(tag)}.env") == STAND_IN:
        file = next(iter(job.keys.texts("actor_train.data_args.file_name")), None)
        columns = {"prompt": "prompt", "answer": None}
        return {"path": file or "NAME/THE-TASKS", "columns": columns, "tag": tag}
    return {"seeds": seeds, "first_seed": first, "tag": tag}
