"""Texts that are costly to read: Python's `re` and its arithmetic hold the interpreter's lock, so no
time limit of an episode can end them, and a worker stands still."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from roll.envs.tools.built_in.calculator import calculator


@contextmanager
def at_once(cpu_s: float = 2.0) -> Iterator[None]:
    """Fails if what is done takes more CPU time."""
    begun = time.process_time()
    yield
    assert time.process_time() - begun < cpu_s


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("round(5, -10000000)", "0"),
        ("round(5, -1000000000)", "0"),
        ("round(5, 1000000000)", "5"),
        ("round(2.5, -1000000000)", "0"),
        ("round(2.5, 1000000000)", "2.5"),
        ("round(7 * 10**999, -1000)", f"1{'0' * 1000}"),
    ],
)
def test_the_calculator_rounds_to_any_place_at_once(expression: str, value: str) -> None:
    with at_once():
        assert calculator(expression) == value
