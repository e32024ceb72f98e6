"""Cases of a problem, in five forms: what a program is judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function."""

    arguments: Sequence[Any]
    """Values that JSON has."""
    expected: Any
    """Plain value (`values.encode`). Where it is a list, the program may return a tuple."""


@dataclass(frozen=True, slots=True)
class TextCase:
    """A standard input, and the right standard output."""

    stdin: str
    expected: str


@dataclass(frozen=True, slots=True)
class Checker:
    """A program of the row that says whether an output is right (`checker.judge_by_checker`)."""

    text: str
    order: tuple[str, ...] = ("input", "output", "expected")
    """What the files are whose names a script gets as its arguments; this is testlib's order."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Standard input and output."""

    cases: Sequence[TextCase]
    checker: Checker | None = None
    """For problems with several right outputs."""


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of one function."""

    entry: str
    """Name of the function; a method of a class `Solution` may be named with or without it."""
    calls: Sequence[Call]


@dataclass(frozen=True, slots=True)
class Suite:
    """Python that tests the names which a program defines."""

    text: str
    style: str
    """`asserts`: each assert is a case; `pytest`: each test function is one; `check`: the whole is
    one, and passes if it ends without an exception."""
    entry: str | None = None
    """Name of the function that the tests get as the argument of their own function `check`."""
    prelude: str = ""
    """Text that a program of one function is put behind, such as its imports and signature."""


Problem = Texts | Calls | Suite
