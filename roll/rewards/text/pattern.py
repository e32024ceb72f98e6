"""The `pattern` reward: a regular expression that must, or must not, match."""

from __future__ import annotations

from typing import Literal

from roll.core.errors import ConfigError, DataError
from roll.core.types import Sample
from roll.rewards.api import Reward
from roll.rewards.packages import optional_package
from roll.rewards.text.limited import PATTERN_CPU_S, Find, limited, matches
from roll.rewards.text.references import final_of


def pattern_reward(
    sample: Sample,
    *,
    pattern: str | None = None,
    column: str | None = None,
    find: Find = "search",
    ignore_case: bool = False,
    expect: Literal["match", "no_match"] = "match",
) -> Reward:
    """Return 1 if a regular expression matches the text after the thoughts, else 0.

    The expression is one of the package `regex`, a superset of Python's. A match that takes more
    than 0.2 s of CPU time, which a response can cause, scores 0 in either case and shows as the
    part `timeout`. So does an empty text.

    Args:
        sample: sample to score.
        pattern: the expression for all rows; or
        column: the column with the expression of each row.
        find: `search` anywhere in the text, or `fullmatch` of all of it without white space at the
            ends.
        ignore_case: True ignores case.
        expect: `no_match` gives 1 if the expression does not match.

    Parts: `timeout`.

    Raises:
        DataError: the column is missing or has no regular expression.
        TimeoutError: the machine gave the check no CPU time; this is a failure of the reward.
    """
    expression = pattern if pattern is not None else _of_row(sample, column or "")
    text = final_of(sample).strip()
    if not text:
        return Reward(0.0, {"timeout": 0.0})
    found = limited(matches, expression, ignore_case, find, text, cpu_s=PATTERN_CPU_S)
    right = found is not None and found == (expect == "match")
    return Reward(float(right), {"timeout": float(found is None)})


def _of_row(sample: Sample, column: str) -> str:
    """Return the expression of a row; DataError if there is none."""
    expression = sample.extra.get(column)
    if not isinstance(expression, str) or (wrong := _wrong(expression)):
        reason = "has no text there" if not isinstance(expression, str) else wrong
        raise DataError(f"row {sample.prompt.id}: column {column!r}: {reason}")
    return expression


def _wrong(expression: str) -> str:
    """Return what is wrong with a regular expression; an empty text if nothing is."""
    regex = optional_package("regex", "regex", "regular expression is matched")
    try:
        regex.compile(expression)
    except regex.error as error:
        return f"{expression!r:.60} is no regular expression ({error})"
    return ""


def check_pattern(pattern: str | None = None, column: str | None = None, **_: object) -> None:
    """Raise ConfigError unless there is one expression, which can be read."""
    if (pattern is None) == (column is None):
        raise ConfigError("give pattern or column, and not both")
    if pattern is not None and (wrong := _wrong(pattern)):
        raise ConfigError(f"pattern: {wrong}")
