"""`migrate`: from a run file of another framework to the text of one of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.config.errors import ConfigError
from roll.migrate.draft import one_line
from roll.migrate.fit import fit_to_devices
from roll.migrate.from_roll.run import translate_roll
from roll.migrate.from_verl.run import translate_verl
from roll.migrate.job import Job
from roll.migrate.keys import Keys, leaves
from roll.migrate.nemo_rl import translate_nemo_rl
from roll.migrate.read import SourceFile, read_file

TRANSLATORS: dict[str, Callable[[Job], None]] = {
    "ROLL": translate_roll,
    "verl": translate_verl,
    "NeMo RL": translate_nemo_rl,
}
_VARIABLE = "other keys refer to it; its value stands where they are"
_NULL = "null, as if it were left out"
_HELD = "holds here without it"
_UNKNOWN = "has no counterpart; nothing of it was translated"


@dataclass(frozen=True, slots=True)
class Migration:
    """A translated run file, and what could not be translated."""

    framework: str
    text: str
    """The YAML file, with comments."""
    todo: list[str] = field(default_factory=list)
    """What to do before the run, one line each."""
    untranslated: list[str] = field(default_factory=list)
    """Keys without a counterpart, `key (place): reason`."""


def migrate(path: Path, *, model: str | None = None, data: str | None = None) -> Migration:
    """Translate a run file of ROLL, verl or NeMo RL; every key of it is translated or named.

    Args:
        path: the file; files in its `defaults` are looked for beside and above it.
        model: folder or hub name that replaces the path of every model.
        data: file or hub name that replaces the path of every source.

    Raises:
        ConfigError: the file cannot be read, is of none of the three frameworks, or of a kind of
            run that does not exist here.
    """
    source = read_file(path)
    framework = framework_of(source)
    job = Job(Keys(source))
    TRANSLATORS[framework](job)
    fit_to_devices(job)
    _replace_paths(job, model, data)
    for name in source.missing:
        job.ask(
            f"`defaults` names {name}, which was not found beside or above the file; what it sets "
            "is missing here"
        )
    untranslated = list(_named(job))
    return Migration(framework, _text(job, framework, untranslated), job.todo, untranslated)


def framework_of(source: SourceFile) -> str:
    """Return the framework that a file is of, by its sections.

    Raises:
        ConfigError: the file is of none of them, or already one of ours.
    """
    there = set(source.tree)
    if {"actor_rollout_ref", "trainer"} & there and "actor_train" not in there:
        return "verl"
    if "policy" in there and {"grpo", "sft", "dpo", "rm", "distillation", "cluster"} & there:
        return "NeMo RL"
    if "pools" in there and "model" in there:
        raise ConfigError(f"{source.path}: is a run file of this framework already: it has `pools`")
    roles = {"actor_train", "actor_infer", "sft_train", "student", "student_train", "rewards"}
    if there & (roles | {"custom_envs", "train_env_manager", "pretrain"}):
        return "ROLL"
    raise ConfigError(
        f"{source.path}: is no run file of ROLL (actor_train, sft_train, student), verl "
        "(actor_rollout_ref) or NeMo RL (policy, grpo); its keys are "
        f"{', '.join(map(str, source.tree)) or 'none'}"
    )


def _named(job: Job) -> list[str]:
    """Return a line for each key that was not translated, in the order of the file."""
    keys, source = job.keys, job.keys.source
    for leaf in keys.unanswered():
        dotted = ".".join(leaf)
        if keys.has(dotted) or _value_at(source.tree, leaf) is not None:
            referred = any(leaf[: len(path)] == path for path in source.referred)
            keys.reasons[leaf] = _VARIABLE if referred else _UNKNOWN
        else:
            keys.reasons[leaf] = _NULL
    told_in_file = job.draft.origins()
    for leaf in keys.used:
        ends = range(min(2, len(leaf)), len(leaf) + 1)
        if told_in_file.isdisjoint(".".join(leaf[:end]) for end in ends):
            keys.reasons.setdefault(leaf, _HELD)
    lines: dict[str, None] = {}
    for leaf in leaves(source.tree):
        why = keys.reasons.get(leaf)
        if why is not None:
            # A library of settings in another file is named by its parts.
            told = leaf if source.is_in_run_file(leaf) else leaf[:2]
            lines[one_line(f"{'.'.join(told)} ({source.where(told)}): {why}")] = None
    return list(lines)


def _value_at(node: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _text(job: Job, framework: str, untranslated: list[str]) -> str:
    """Return the whole file: what to do, what is missing, and the settings."""
    head = [
        f"# Made by `roll migrate {job.keys.source.path.name}` from a run file of {framework}.",
        "# Behind each value stands the key that it was made of; `default` means that the file",
        f"# leaves it out, and {framework} has this value then.",
    ]
    if job.todo:
        head += ["#", "# Before the run:", *(f"# * {one_line(line)}" for line in job.todo)]
    if untranslated:
        head += ["#", "# Not translated (key, place, reason):", *(f"# - {u}" for u in untranslated)]
    return "\n".join([*head, "", job.draft.text()])


def _replace_paths(job: Job, model: str | None, data: str | None) -> None:
    """Put the model and the data that the user names in the places of those of the file."""
    tree = job.draft.tree
    if model is not None:
        for node in _mappings(tree):
            if isinstance(node.get("model"), dict) and "path" in node["model"]:
                node["model"]["path"] = model
    if data is not None:
        for group in ("data", "validation"):
            for node in _mappings(tree.get(group, {})):
                if "path" in node:
                    node["path"] = data


def _mappings(node: Any) -> list[dict[str, Any]]:
    """Return every mapping in `node`, itself included."""
    if isinstance(node, list):
        return [each for item in node for each in _mappings(item)]
    if not isinstance(node, dict):
        return []
    return [node, *(each for item in node.values() for each in _mappings(item))]
