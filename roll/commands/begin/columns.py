"""The columns of a data file, and what `roll init` takes each of them for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.config.base import Config
from roll.config.errors import UserError, nearest
from roll.config.sections.data import (
    ColumnsConfig,
    PreferenceColumns,
    TaughtColumns,
    TextColumns,
    TextSource,
)
from roll.core.errors import DataError
from roll.data.readers import FILE_READERS
from roll.data.sources import resolve_format

Columns = Mapping[str, str | None]
"""Field of a source's `columns` -> name of the column; None: there is none."""

CLASSES: Mapping[str, type[Config]] = {
    "rlvr": ColumnsConfig,
    "agentic": ColumnsConfig,
    "sft": TextColumns,
    "distill": TaughtColumns,
    "dpo": PreferenceColumns,
    "reward_model": PreferenceColumns,
}
"""Class of `columns`, by pipeline."""

_NAMES = {
    "messages": ("messages", "conversations", "conversation", "dialogue", "chat", "prompt"),
    "prompt": ("prompt", "question", "problem", "query", "instruction", "task", "input", "text"),
    "answer": (
        *("answer", "solution", "final_answer", "ground_truth", "expected_answer", "target"),
        *("label", "gold", "reference", "output"),
    ),
    "completion": ("completion", "response", "output", "answer", "solution", "text"),
    "chosen": ("chosen", "preferred", "better", "winner"),
    "rejected": ("rejected", "dispreferred", "worse", "loser"),
    "label": ("label", "desirable", "thumbs_up"),
}
"""Common names of the column of a field, the likeliest first."""


@dataclass(frozen=True, slots=True)
class Data:
    """The data of a run, as far as it was looked at."""

    path: str
    """File, folder or name on the hub; empty if an environment makes its tasks of seeds."""
    seeds: int | None = None
    """Number of tasks that an environment makes."""
    first: Mapping[str, Any] | None = None
    """First row of a file; None if nothing was read."""


def look_at(text: str) -> Data:
    """Return the data that a user has named: a file, of which the first row is read, a folder of
    `save_to_disk`, a dataset on the hub, or a number of tasks.

    Raises:
        DataError: there is no such file, it has no rows, or its first row cannot be read.
    """
    path = Path(text).expanduser()
    if text.isascii() and text.isdecimal() and not path.exists():
        return Data("", seeds=int(text))
    form = resolve_format(TextSource(path=text))
    if form in ("hub", "disk"):
        return Data(text)
    for row in FILE_READERS[form](path):
        return Data(text, first=row.values)
    raise DataError(f"{text}: no rows; a run needs at least one")


def likely_pipeline(data: Data) -> str:
    """Return the pipeline that the columns of the data fit best."""
    if data.seeds is not None:
        return "agentic"
    for pipeline, fields in (
        ("dpo", ("chosen", "rejected")),
        ("dpo", ("completion", "label")),
        ("rlvr", ("prompt", "answer")),
        ("sft", ("messages",)),
        ("sft", ("completion",)),
    ):
        if data.first and set(fields) <= _found(data.first, fields).keys():
            return pipeline
    return "rlvr"


def likely_columns(pipeline: str, data: Data) -> dict[str, str | None]:
    """Return a column for each field that the pipeline reads; the defaults if no row was read.

    Raises:
        UserError: no column can be taken for one that the pipeline needs.
    """
    if data.first is None:
        fields = CLASSES[pipeline].model_fields
        return {name: field.default for name, field in fields.items() if field.default}
    forms, also = _forms(pipeline)
    for form in forms:
        found = _found(data.first, (*form, *_beside(form, also)))
        if found.keys() >= set(form):
            return found
    here = _options(pipeline)
    others = dict[str, list[str]]()
    for name in CLASSES:
        if _options(name) != here:
            others.setdefault(_options(name), []).append(name)
    told = "; ".join(f"{', '.join(names)}: {text}" for text, names in others.items())
    raise UserError(
        f"{data.path}: no columns look like those of pipeline {pipeline} (columns: "
        f"{', '.join(data.first)}); name them: --columns {here}; or name another --pipeline, too "
        f"({told})"
    )


def _forms(pipeline: str) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Return the forms that rows of a pipeline can have, each with the fields that it needs, and
    the fields that may stand beside them."""
    if pipeline in ("rlvr", "agentic"):
        return [("messages",), ("prompt",)], ("answer",)
    if pipeline in ("sft", "distill"):
        return [("messages",), ("completion",)], ("prompt",)
    forms: list[tuple[str, ...]] = [("chosen", "rejected"), ("completion", "label")]
    return forms[:1] if pipeline == "reward_model" else forms, ("prompt",)


def _beside(form: tuple[str, ...], also: tuple[str, ...]) -> tuple[str, ...]:
    """Return the fields of `also` that may stand beside a form: a conversation has its prompt."""
    return () if form == ("messages",) and also == ("prompt",) else also


def _options(pipeline: str) -> str:
    """Return what `--columns` takes for a pipeline, the prompt first."""
    forms, also = _forms(pipeline)
    whole = [{*form, *_beside(form, also)} for form in forms]
    return " or ".join(
        ",".join(f"{field}=COLUMN" for field in _NAMES if field in fields) for fields in whole
    )


def read_columns(text: str, pipeline: str, data: Data) -> dict[str, str | None]:
    """Return the columns that a user has named, as in `prompt=question,answer=null`.

    Raises:
        UserError: the text has another form, or names a field or a column that does not exist.
    """
    known, named = CLASSES[pipeline].model_fields, dict[str, str | None]()
    for part in filter(None, text.split(",")):
        field, equals, column = (word.strip() for word in part.partition("="))
        if not equals or not column or field in named:
            raise UserError(f"{text!r}: expected FIELD=COLUMN,..., each field once")
        if field not in known:
            raise UserError(
                f"pipeline {pipeline} reads no {field!r}{nearest(field, known)} (it reads "
                f"{', '.join(known)})"
            )
        if column != "null" and data.first is not None and column not in data.first:
            raise UserError(
                f"{data.path}: no column {column!r}{nearest(column, data.first)} (columns: "
                f"{', '.join(data.first)})"
            )
        named[field] = None if column == "null" else column
    return named


def _found(row: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, str | None]:
    """Return the likeliest column of each field that has one; no column is taken twice."""
    found: dict[str, str | None] = {}
    lower = {name.lower(): name for name in reversed(list(row))}
    for field in fields:
        names = [lower[name] for name in _NAMES[field] if name in lower]
        fitting = (name for name in names if name not in found.values() and _fits(field, row[name]))
        column = next(fitting, None)
        if column is not None:
            found[field] = column
    return found


def _fits(field: str, value: Any) -> bool:
    """Return whether a value of the first row can be one of the field."""
    return _TESTS[field](value)


def _is_conversation(value: Any) -> bool:
    if isinstance(value, str):
        return value.lstrip().startswith("[{")
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_either(value: Any) -> bool:
    return _is_text(value) or _is_conversation(value)


_TESTS: Mapping[str, Callable[[Any], bool]] = {
    "messages": _is_conversation,
    "prompt": _is_text,
    "answer": lambda value: isinstance(value, str | int | float),
    "completion": _is_either,
    "chosen": _is_either,
    "rejected": _is_either,
    "label": lambda value: isinstance(value, bool | int | str),
}
"""Test of a value of the first row, by field."""
