"""The `json` reward: a JSON value that fits a schema."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from roll.core.errors import ConfigError, DataError
from roll.core.types import Sample
from roll.rewards.api import Reward
from roll.rewards.packages import optional_package
from roll.rewards.text.limited import SCHEMA_CPU_S, fits_schema, limited
from roll.rewards.text.references import final_of

_FENCE = re.compile(r"^[ \t]*+```[ \t]*+(\w*+)[ \t]*+$", re.MULTILINE)


def json_reward(
    sample: Sample,
    *,
    schema: dict[str, Any] | None = None,
    column: str | None = None,
    place: Literal["auto", "all", "block"] = "auto",
) -> Reward:
    """Return 1 if the response gives a JSON value that fits a JSON schema, else 0.

    The value is read strictly: no comments, no `NaN`, and no key twice in an object, since readers
    differ in which they take. A check that takes more than a second of CPU time scores 0 and shows
    as the part `timeout`. References to other documents are not followed.

    Args:
        sample: sample to score.
        schema: the schema for all rows; or
        column: the column with the schema of each row, a mapping or its JSON text.
        place: `all`: the text after the thoughts is the value; `block`: it is in the last fenced
            block; `auto`: in the last fenced block if there is one.

    Parts: `json`, 1 if there was a JSON value; `timeout`.

    Raises:
        DataError: the column is missing or has no schema.
        TimeoutError: the machine gave the check no CPU time; this is a failure of the reward.
    """
    rules = json.dumps(schema) if schema is not None else _of_row(sample, column or "")
    text = json_text(final_of(sample), place)
    if text is None or not _is_strict(text):
        return Reward(0.0, {"json": 0.0, "timeout": 0.0})
    fits = limited(fits_schema, rules, text, cpu_s=SCHEMA_CPU_S)
    return Reward(float(bool(fits)), {"json": 1.0, "timeout": float(fits is None)})


def json_text(final: str, place: str) -> str | None:
    """Return the text of the value; None if it is not at its place.

    `place` is `auto`, `all` or `block`, see `json_reward`. That the text is JSON is not checked.
    """
    fences = list(_FENCE.finditer(final)) if place != "all" else []
    if len(fences) >= 2 and not fences[-1][1]:
        return final[fences[-2].end() : fences[-1].start()].strip()
    return None if place == "block" else final.strip()


def _is_strict(text: str) -> bool:
    """Return whether a text is JSON without `NaN`, `Infinity` and repeated keys, and not nested too
    deeply. A number too large for a float, such as 1e999, passes."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key stands twice")
        return found

    try:
        json.loads(text, parse_constant=refuse, object_pairs_hook=each_once)
    except (ValueError, RecursionError):
        return False
    return True


def _of_row(sample: Sample, column: str) -> str:
    """Return the schema of a row as a JSON text; DataError if there is none."""
    found = sample.extra.get(column)
    try:
        rules = json.loads(found) if isinstance(found, str) else found
        if not isinstance(rules, Mapping):
            raise ValueError("expected a mapping or its JSON text")
        text = json.dumps(rules)
        _check(text)
    except (ValueError, TypeError) as error:
        raise DataError(f"row {sample.prompt.id}: column {column!r}: {error}") from None
    return text


@functools.lru_cache(maxsize=1024)
def _check(schema: str) -> None:
    """Raise ConfigError if a schema, as a JSON text, is none."""
    jsonschema = optional_package("jsonschema", "jsonschema", "JSON schema is checked")
    rules = json.loads(schema)
    validator = jsonschema.validators.validator_for(rules, jsonschema.Draft202012Validator)
    try:
        validator.check_schema(rules)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"is no JSON schema: {error.message}") from None


def check_json(
    schema: dict[str, Any] | None = None, column: str | None = None, **_: object
) -> None:
    """Raise ConfigError unless there is one schema, which can be read."""
    if (schema is None) == (column is None):
        raise ConfigError("give schema or column, and not both")
    if schema is not None:
        _check(json.dumps(schema))
