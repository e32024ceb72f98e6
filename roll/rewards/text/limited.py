"""Checks whose time a response can blow up, in child processes with a limit on CPU time.

A regular expression may take exponential time on a text that a policy has found, and so may a
schema with patterns. With CPU time the same response gets the same verdict on a busy machine.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
from collections.abc import Callable
from typing import Any, Literal

from roll.rewards.execution.child import ChildDiedError, ChildSpec
from roll.rewards.execution.child_pool import ChildPool, NoChildFreeError

PATTERN_CPU_S = 0.2
"""Limit on the CPU time of a regular expression, in seconds; a good one takes milliseconds. It is
short, so that a whole batch of responses that blow it up leaves the queue in time."""
SCHEMA_CPU_S = 1.0
"""Limit on the CPU time of a JSON schema, in seconds; a large value takes a part of it."""
CHECK_PATIENCE_S = 30.0
"""Limit on the wall-clock time of one check, in seconds; after it the sample has no verdict."""
QUEUE_TIMEOUT_S = 8.0
"""Longest wait for a free child, in seconds; below the default `timeout_s` of a reward."""
MEMORY_BYTES = 2**30
"""Limit on the address space that a child may add after its start, in bytes."""
MAX_PROCESSES = 2
"""Largest number of child processes."""

Find = Literal["search", "fullmatch"]


def limited(check: Callable[..., bool], *args: object, cpu_s: float) -> bool | None:
    """Return the result of one of the checks below, run in a child process; None if it used up
    `cpu_s` seconds of CPU time, or its memory. `check` is `matches` or `fits_schema`, `args` are
    its arguments.

    Raises:
        TimeoutError: no child was free in time, or the machine gave it too little CPU time.
        ChildRaisedError: the check raised an exception.
    """
    try:
        verdict = _children().call(
            (check.__name__, args),
            cpu_s,
            queue_timeout_s=QUEUE_TIMEOUT_S,
            patience_s=CHECK_PATIENCE_S,
        )
    except NoChildFreeError:
        raise
    except (TimeoutError, ChildDiedError):
        return None
    assert verdict is None or isinstance(verdict, bool)
    return verdict


def start_limited() -> None:
    """Wait until the first child has started (a second)."""
    _children().warm_up()


def matches(pattern: str, ignore_case: bool, find: Find, text: str) -> bool:
    """Return whether a regular expression of the package `regex` finds the text."""
    import regex

    flags = regex.IGNORECASE if ignore_case else 0
    return bool(getattr(regex, find)(pattern, text, flags))


def fits_schema(schema: str, value: str) -> bool:
    """Return whether a JSON value fits a JSON schema; both as JSON texts. Nothing is fetched:
    references to other documents do not fit."""
    import jsonschema
    import referencing.exceptions

    rules = json.loads(schema)
    validator = jsonschema.validators.validator_for(rules, jsonschema.Draft202012Validator)
    try:
        return bool(validator(rules, registry=referencing.Registry()).is_valid(json.loads(value)))
    except referencing.exceptions.Unresolvable:
        return False


def make_checker() -> Callable[[tuple[str, tuple[Any, ...]]], bool | None]:
    """Return the function that runs in the child: one of the checks above, by its name."""
    # Imported once, before the child forks: later, their import would count as time of a check.
    for package in ("regex", "jsonschema", "referencing.exceptions"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(package)
    checks: dict[str, Callable[..., bool]] = {c.__name__: c for c in (matches, fits_schema)}

    def check(call: tuple[str, tuple[Any, ...]]) -> bool | None:
        name, args = call
        try:
            return checks[name](*args)
        except (MemoryError, RecursionError):
            return None

    return check


@functools.cache
def _children() -> ChildPool:
    """Return the one pool of child processes of this process; the children end with the process."""
    factory = "roll.rewards.text.limited:make_checker"
    spec = ChildSpec(factory, (), MEMORY_BYTES, fork=True, clock="cpu")
    return ChildPool(spec, min(MAX_PROCESSES, len(os.sched_getaffinity(0))))
