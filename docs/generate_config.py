"""Generator of docs/config: every key of a run file, made from the config classes.

    python -m docs.generate_config

A test fails if a file differs from what this script would write, or if a key lacks a description,
or a number its unit.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs.config_words import (
    classes_in,
    default_of,
    is_number,
    meaning_of,
    one_line,
    takes_own,
    type_of,
    unit_of,
)
from roll.config import PIPELINES, load_config
from roll.config.evaluation import ChatConfig, EvalConfig, QuestionSet
from roll.config.user_code.own import OwnPart

FOLDER = Path(__file__).parent / "config"
ROOT = FOLDER.parents[1]
ROOTS: dict[str, type[BaseModel]] = {
    **PIPELINES,
    "set": QuestionSet,
    "engines": EvalConfig,
    "chat": ChatConfig,
}
"""Name of a sort of file -> its class; keys are told of the first sort that has them."""

PAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "model": ("Models", "Models, adapters, and how much of them is trained.", ("model",)),
    "roles": (
        "Roles and backends",
        "What trains, scores and generates, on which devices, with which backend.",
        ("actor_train", "actor_infer", "reference", "critic", "process_reward", "teachers"),
    ),
    "data": ("Data", "Sources of rows and tasks.", ("data",)),
    "rollout": (
        "Rollout",
        "Generation of samples, and the way of new weights to the engines.",
        ("sampling", "rollout", "domains", "weight_sync"),
    ),
    "rewards": ("Rewards", "What judges a response.", ("rewards", "judges")),
    "algorithm": ("Algorithms and losses", "What a step learns.", ("algorithm", "loss")),
    "agents": (
        "Environments and agents",
        "What a policy takes turns with.",
        ("environments", "opponents", "corpora"),
    ),
    "run": (
        "The run",
        "Machines, checkpoints, trackers, validation.",
        ("cluster", "checkpoint", "track", "profile", "validation"),
    ),
    "eval": (
        "Evaluation and chat",
        "Files of `roll eval` and `roll chat`; other keys are those of a run file.",
        (),
    ),
}
"""File -> title, introduction, and the first keys whose sections are there."""

INTRO = """\
# Configuration reference

Every key that a run file may have, made from the classes that check it; a key that is not here is
refused. `roll show run.yaml` prints all keys of your own file with their values.

* *value*: type, limits, and the unit of a number. A *section* has keys of its own, on the page that
  its name leads to.
* *default*: what is taken if the key is left out; `required` keys cannot be. `null` switches a part
  off, or lets the run choose, as the key says.
* In a path, `NAME` stands for a name of your choice, and `[]` for an entry of a list. A section
  with a `kind` is one of several: `{kind: grpo, std: none}`.
* *Example* values are those of a run file in [examples](../../examples/README.md).

The command line sets the same keys: `roll run run.yaml actor_train.optimizer.lr=1e-5`.
"""


@dataclass(frozen=True)
class Section:
    """A config class at the place where it is told of."""

    model: type[BaseModel]
    path: str
    """Keys that lead there, as they stand in a file."""
    anchor: str
    page: str
    others: list[str] = field(default_factory=list)
    """Further paths of the same class."""


def pages() -> dict[str, str]:
    """Return every page, by its file name, in Markdown."""
    sections = _sections()
    made = {"README.md": _index(sections)}
    for name, (title, about, _) in PAGES.items():
        parts = [f"# {title}\n", f"{about} How to read it: [Configuration reference](README.md).\n"]
        for section in sections.values():
            if section.page == name:
                parts += _told(section, sections)
        made[f"{name}.md"] = "\n".join(parts).rstrip() + "\n"
    return made


def lacking() -> list[str]:
    """Return the keys without a description, and the numbers without a unit."""
    models = [*PIPELINES.values(), *_sections()]
    keys = [(model, name) for model in models for name in model.model_fields if name != "kind"]
    found = []
    for model, name in dict.fromkeys(keys):
        meaning, annotation = meaning_of(model, name), model.model_fields[name].annotation
        if not meaning:
            found.append(f"{model.__name__}.{name}: no description")
        if is_number(annotation) and unit_of(name, meaning) is None:
            found.append(f"{model.__name__}.{name}: no unit in the name or {meaning[:40]!r}")
    return found


def _index(sections: dict[type[BaseModel], Section]) -> str:
    """Return the first page: the keys at the top of each pipeline's file."""
    parts = [INTRO]
    for name, model in PIPELINES.items():
        parts += [f"## `pipeline: {name}`\n", f"{one_line(inspect.getdoc(model) or '')}\n"]
        parts += _table(model, name, "", sections, "README", "")
    return "\n".join(parts).rstrip() + "\n"


def _told(section: Section, sections: dict[type[BaseModel], Section]) -> Iterator[str]:
    """Yield a section: its heading, what it is, and its keys."""
    kind = _kind(section.model)
    yield f'<a id="{section.anchor}"></a>\n'
    yield f"## `{section.path}`" + (f": `{kind}`" if kind else "") + "\n"
    for paragraph in (inspect.getdoc(section.model) or "").split("\n\n"):
        yield one_line(paragraph) + "\n"
    if section.others:
        yield "Also at " + ", ".join(f"`{path}`" for path in section.others) + ".\n"
    yield from _table(
        section.model, section.anchor, section.path, sections, section.page, f"{section.anchor}."
    )


def _table(
    model: type[BaseModel],
    anchor: str,
    path: str,
    sections: dict[type[BaseModel], Section],
    page: str,
    prefix: str,
) -> Iterator[str]:
    """Yield the table of the keys of a class."""
    prefix = prefix or f"{anchor}."
    rows = list(_rows(model, prefix, sections, page))
    if rows:
        yield "| key | value | default | meaning |\n|---|---|---|---|"
        yield from rows
        yield ""


def _rows(
    model: type[BaseModel], prefix: str, sections: dict[type[BaseModel], Section], page: str
) -> Iterator[str]:
    """Yield a row for each key of a class, but its `kind`, which the heading names."""
    for name, info in model.model_fields.items():
        if name == "kind" and _kind(model):
            continue
        meaning = meaning_of(model, name)
        value = type_of(info.annotation, info.metadata)
        if unit := unit_of(name, meaning) if is_number(info.annotation) else None:
            value += f"; {unit}"
        if linked := _links(info, sections, page):
            meaning += f" Section: {linked}."
        elif example := _example(model, name):
            meaning += f" Example: `{example}`."
        if takes_own(info):
            meaning += " Or [a class of your own](../extend.md)."
        key = f'<a id="{prefix}{name}"></a>`{name}`'
        yield f"| {key} | {value} | {default_of(info)} | {meaning} |"


def _links(info: FieldInfo, sections: dict[type[BaseModel], Section], page: str) -> str:
    """Return links to the sections that may stand at a key."""
    found = []
    for model in classes_in(info.annotation):
        if (section := sections.get(model)) is None:
            continue
        file = "" if section.page == page else f"{section.page}.md"
        found.append(f"[`{_kind(model) or section.path}`]({file}#{section.anchor})")
    return ", ".join(found)


@cache
def _sections() -> dict[type[BaseModel], Section]:
    """Return every config class below the roots, in the order of the keys that lead there."""
    found: dict[type[BaseModel], Section] = {}
    anchors: set[str] = set()
    first_keys = {key: page for page, (_, _, keys) in PAGES.items() for key in keys}

    def enter(root: str, start: type[BaseModel]) -> None:
        """Walk through a file of one sort, short paths first."""
        waiting: deque[tuple[type[BaseModel], str]] = deque([(start, "")])
        while waiting:
            model, path = waiting.popleft()
            for name, info in model.model_fields.items():
                for below, marks in _children(info.annotation):
                    place = f"{path}.{name}{marks}".removeprefix(".")
                    if issubclass(below, OwnPart):
                        continue
                    if (known := found.get(below)) is not None:
                        if place not in (known.path, *known.others) and root in PIPELINES:
                            known.others.append(place)
                        continue
                    anchor = ".".join(filter(None, (place.replace("[]", ""), _kind(below))))
                    shown = place if anchor not in anchors else f"{place} ({root})"
                    anchor = anchor if anchor not in anchors else f"{root}.{anchor}"
                    anchors.add(anchor)
                    first = place.partition(".")[0].removesuffix("[]")
                    page = first_keys[first] if root in PIPELINES else "eval"
                    found[below] = Section(below, shown, anchor, page)
                    waiting.append((below, place))

    for root, model in ROOTS.items():
        if root not in PIPELINES:
            found[model] = Section(model, ROOT_TITLES[root], root, "eval")
        enter(root, model)
    return found


ROOT_TITLES = {
    "set": "a set of questions",
    "engines": "engines of an evaluation",
    "chat": "a chat",
}


MARKS: dict[object, str] = {tuple: "[]", list: "[]", dict: ".NAME"}
"""What the name of a key gets after it for each kind of collection it holds."""


def _children(annotation: Any, marks: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """Yield the config classes in a type, each with the marks of the list or mapping it is in."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, marks
        return
    marks += MARKS.get(get_origin(annotation), "")
    for argument in get_args(annotation):
        yield from _children(argument, marks)


def _kind(model: type[BaseModel]) -> str:
    """Return the `kind` that chooses a class; empty if it chooses none, or is a key like others."""
    info = model.model_fields.get("kind")
    if info is None or info.is_required() or len(get_args(info.annotation)) > 1:
        return ""
    return str(info.default)


def _example(model: type[BaseModel], name: str) -> str:
    """Return a value of a key in one of the examples; empty if none is short, or needed."""
    info = model.model_fields[name]
    if name == "pipeline" or str(type_of(info.annotation)).startswith(("`true", "one of")):
        return ""
    for base in model.__mro__:
        if value := _examples().get((base, name)):
            return value
    return ""


@cache
def _examples() -> dict[tuple[type, str], str]:
    """Return short values of the run files in examples/, by class and key."""
    found: dict[tuple[type, str], str] = {}

    def look(value: Any) -> None:
        if isinstance(value, dict):
            value = tuple(value.values())
        if isinstance(value, tuple):
            for one in value:
                look(one)
        if not isinstance(value, BaseModel):
            return
        dumped = value.model_dump(mode="json")
        for name in sorted(value.model_fields_set):
            look(getattr(value, name))
            text = yaml.safe_dump(dumped[name], default_flow_style=True, width=1000)
            text = text.removesuffix("...\n").strip()
            is_default = getattr(value, name) == type(value).model_fields[name].get_default()
            if is_default or len(text) > 48 or "`" in text or "|" in text:
                continue
            for base in type(value).__mro__:
                if name in getattr(base, "__pydantic_fields__", {}):
                    found.setdefault((base, name), text)

    for path in sorted(ROOT.glob("examples/*/*.yaml")):
        look(load_config(path).config)
    return found


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
