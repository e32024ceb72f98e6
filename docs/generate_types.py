"""Generator of docs/types.md: everything that `roll.extend` exports, made from its docstrings.

    python -m docs.generate_types

A test fails if the file differs from what this script would write, or if a field has no text.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import roll.extend
from docs.config_words import default_of, meaning_of, one_line, type_of
from docs.docstrings import of_attributes
from roll.config.user_code.own import OwnPart
from roll.core.batch import Batch
from roll.core.completion import FinishReason
from roll.core.types import SamplingParams, Turn
from roll.rollout.types import ScoredSample

TARGET = Path(__file__).parent / "types.md"

INTRO = """\
# Types of your own parts

What [classes of your own](extend.md) derive from, are given, and return: all names of
`roll.extend`, made from the code. In shapes, B are samples, T tokens and R rewards; a name that
ends in `_BT` is a tensor of that shape. The value at position t describes token t of its row:
prompt, response, and padding up to the longest row. A batch is frozen: `dataclasses.replace` makes
another with a field changed.
"""

OTHERS: dict[str, Any] = {
    "ScoredSample": ScoredSample,
    "Turn": Turn,
    "SamplingParams": SamplingParams,
    "FinishReason": FinishReason,
}
"""Types that are not exported because nobody makes them, but that fields of exported ones have."""

SECTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Bases",
        "Each part derives from one. Class attributes are set in the class body; an option is a "
        "field, which the run file sets beside `kind`.",
        (
            "SampleAdvantage",
            "Advantage",
            "LossTerm",
            "PolicyLoss",
            "RewardShaping",
            "SampleMask",
            "SampleWeight",
            "AdvantageShaping",
            "Curriculum",
            "Filter",
            "RolloutLoop",
            "ChatTemplate",
            "Tracker",
            "Env",
            "RewardWorker",
        ),
    ),
    (
        "A step",
        "What advantages, losses and shaping read and return. `Samples` is what has the fields of "
        "both `RolloutBatch` and `SampleTable`: code for it reads these alone.",
        (
            "Samples",
            "RolloutBatch",
            "SampleTable",
            "PolicyTerms",
            "TokenLoss",
            "Estimate",
            "Rewards",
            "Turn",
        ),
    ),
    (
        "Prompts and samples",
        "What curricula, filters, loops and rewards read and return.",
        (
            "Prompt",
            "Seen",
            "Group",
            "ScoredSample",
            "Sample",
            "Completion",
            "FinishReason",
            "Writing",
            "SamplingParams",
            "Reward",
            "RewardContext",
        ),
    ),
    (
        "Helpers",
        "",
        (
            "Need",
            "Siblings",
            "total_rewards",
            "log_ratio",
            "Metrics",
            "Sum",
            "Mean",
            "Max",
            "Last",
            "Record",
            "TrackedRun",
        ),
    ),
)
"""Heading, remark, and the names that are told of there."""

WITH_CONFIG = ("Pipeline", "Config")
"""Endings of the names of pipelines and of their configs, which have a table of their own."""
SHAPE = re.compile(r",? ?(bool|int64|float(?:32|64)?) `(\[[A-Z, ]+\])`")
"""Type and shape in the text of a tensor."""
CLASS_ATTRIBUTES = ("needs", "reads_advantages", "reads_entropy", "whole_sequences")
"""Those of the bases that a part may set."""
LETTERS = re.compile(r"_([A-Z]+)$")


def text() -> str:
    """Return the page, in Markdown."""
    parts = [INTRO]
    for title, remark, names in SECTIONS:
        parts += [f"## {title}\n", *([f"{remark}\n"] if remark else [])]
        for name in names:
            parts += _told(name)
    parts += _pipelines()
    return "\n".join(parts).rstrip() + "\n"


def named() -> set[str]:
    """Return the names that the page tells of."""
    pipelines = {name for name in roll.extend.__all__ if name.endswith(WITH_CONFIG)}
    return pipelines | {name for _, _, names in SECTIONS for name in names} | {"Tensor"}


def lacking() -> list[str]:
    """Return the fields without a text."""
    owners = {name: _object(name) for _, _, names in SECTIONS for name in names}
    return [
        f"{name}.{each.name}"
        for name, owner in owners.items()
        if is_dataclass(owner) and isinstance(owner, type)
        for each in fields(owner)
        if not each.name.startswith("_") and each.name not in of_attributes(owner)
    ]


def _object(name: str) -> Any:
    """Return what a name of the page stands for."""
    return OTHERS[name] if name in OTHERS else getattr(roll.extend, name)


def _told(name: str) -> Iterator[str]:
    """Yield the section of a name."""
    owner = _object(name)
    yield f"### {name}\n"
    if name == "Samples":
        yield from _common(*get_args(owner))
    elif inspect.isfunction(owner):
        yield f"```text\n{name}{_signature(owner)}\n```\n"
        yield f"{_about(owner)}\n"
    elif name == "Record":  # an alias, which has no docstring of its own
        yield "`Mapping[str, float]`: name of a metric -> its value in one step.\n"
    else:
        yield from _told_class(owner)


def _told_class(owner: type) -> Iterator[str]:
    """Yield what is said of a class: its docstring, its attributes, and its methods."""
    yield f"{_about(owner)}\n"
    if issubclass(owner, Enum):
        docs = of_attributes(owner)
        yield from (f"* `{value.name}`: {one_line(docs[value.name])}" for value in owner)
        yield ""
        return
    if issubclass(owner, OwnPart):
        yield f"Key: `{owner.place}`.\n"
        yield from _table("default", _settings(owner))
    else:
        yield from _table("shape", _fields(owner))
    for name in _methods(owner):
        made = inspect.getattr_static(owner, name)
        before = "async " if inspect.iscoroutinefunction(made) else ""
        before += f"{owner.__name__}." if isinstance(made, classmethod) else ""
        yield f"```text\n{before}{name}{_signature(getattr(owner, name))}\n```\n"
        yield f"{_about(getattr(owner, name))}\n"


def _methods(owner: type) -> Iterator[str]:
    """Yield the names of the methods that users write or call."""
    yield from sorted(getattr(owner, "__abstractmethods__", ()))
    for name, made in vars(owner).items():
        method = made.__func__ if isinstance(made, classmethod) else made
        told = inspect.isfunction(method) and method.__doc__
        if told and not name.startswith("_") and not getattr(method, "__isabstractmethod__", False):
            yield name
    if issubclass(owner, Batch):
        yield "require"


def _common(*owners: type) -> Iterator[str]:
    """Yield the table of the fields that several batches have in the same form."""
    first, *others = ({row[0]: row for row in _fields(owner)} for owner in owners)
    same = [
        row
        for name, row in first.items()
        if all(name in o and o[name][2] == row[2] for o in others)
    ]
    yield from _table("shape", iter(same))
    yield "Both also have `trained_tokens()`, `keep(kept_B)` and a length, the number of samples.\n"


def _fields(owner: type) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, shape and meaning of the fields and properties of a class."""
    docs = of_attributes(owner)
    for each in fields(owner) if is_dataclass(owner) else ():
        if not each.name.startswith("_"):
            yield _field(each, docs.get(each.name, ""))
    for name, made in vars(owner).items():
        if isinstance(made, property) and made.fget is not None:
            kind = made.fget.__annotations__["return"]
            yield name, f"`{one_line(kind)}`", "", one_line(made.__doc__ or "")


def _field(each: Field[Any], meaning: str) -> tuple[str, str, str, str]:
    """Return name, type, shape and meaning of a field."""
    kind, shape = str(each.type), ""
    if kind.startswith("Tensor"):
        axes = each.metadata.get("axes") or LETTERS.findall(each.name)[0]
        shape = f"`[{', '.join(axes)}]`"
        found = SHAPE.search(meaning)
        assert found is not None, f"{each.name} does not say type and shape: {meaning}"
        assert found[2] == shape.strip("`"), f"{each.name} is {shape}, not {found[2]}"
        kind = kind.replace("Tensor", found[1])
        meaning = meaning.replace(found[0], "", 1)
    return each.name, f"`{one_line(kind)}`", shape, one_line(meaning)


def _settings(owner: type[OwnPart]) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, default and meaning of the class attributes and options of a base."""
    docs = of_attributes(owner)
    for name in CLASS_ATTRIBUTES:
        if hasattr(owner, name):
            default = getattr(owner, name)
            shown = "empty" if default == frozenset() else f"`{default}`"
            yield name, "class attribute", shown, one_line(docs[name])
    for name, field in owner.model_fields.items():
        if name != "kind":
            kind = f"option: {type_of(field.annotation, field.metadata)}"
            yield name, kind, default_of(field), meaning_of(owner, name)


def _table(third: str, rows: Iterator[tuple[str, str, str, str]]) -> Iterator[str]:
    """Yield a table of names; nothing if there are none."""
    lines = [f"| `{name}` | {' | '.join(cells)} |".replace("|  |", "| |") for name, *cells in rows]
    if lines:
        yield f"| | type | {third} | meaning |\n|---|---|---|---|"
        yield from lines
        yield ""


def _pipelines() -> Iterator[str]:
    """Yield the section of the pipelines and of their configs."""
    yield "## Pipelines\n"
    yield (
        "A [pipeline of your own](extend.md#a-pipeline) derives from one, its config class from "
        "the config beside it.\n"
    )
    yield "| pipeline | config | |\n|---|---|---|"
    for name in roll.extend.__all__:
        if name.endswith("Pipeline"):
            owner = _object(name)
            yield f"| `{name}` | `{owner.config_class.__name__}` | {one_line(owner.__doc__)} |"
    yield ""


def _signature(method: Any) -> str:
    """Return the arguments and the result of a function as they stand in its source."""
    signature = inspect.signature(method)
    own = [each for name, each in signature.parameters.items() if name != "self"]
    shown = signature.replace(parameters=own, return_annotation=inspect.Signature.empty)
    return f"{shown} -> {signature.return_annotation}".replace("'", "")


def _about(owner: Any) -> str:
    """Return a docstring: its paragraphs in one line each; arguments, results, errors as lists."""
    parts = []
    for paragraph in inspect.cleandoc(owner.__doc__ or "").split("\n\n"):
        title, _, rest = paragraph.partition("\n")
        entries = re.split(r"\n    (?=\w+: )", f"\n{rest}")[1:]
        if title in ("Args:", "Raises:", "Returns:") and entries:
            word = "raises " if title == "Raises:" else ""
            parts.append("\n".join(f"* {word}`{n}`: {t}" for n, t in map(_entry, entries)))
        else:
            parts.append(one_line(paragraph.removeprefix("Returns:\n")))
    return "\n\n".join(parts)


def _entry(entry: str) -> tuple[str, str]:
    """Return the name and the text of an argument or an error."""
    name, _, text = entry.partition(": ")
    return name, " ".join(text.split())


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
