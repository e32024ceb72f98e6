"""Problems made at random, each with cases in five forms, a right program and wrong ones.

The expected values come from a function here, the program under test is a text of its own.
"""

# ruff: noqa: E501

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

FORMS = ("stdin", "calls", "asserts", "pytest", "check")


@dataclass(frozen=True, slots=True)
class Family:
    """Problems that differ in a number `k`."""

    right: Callable[[Any, int], Any]
    """Function of the argument and k."""
    body: str
    """Body of `f(x)` in a right program; `K` stands for k."""
    wrong: str
    """Body that is off by one, or misses an edge."""
    argument: Callable[[random.Random], Any]


def _number(rng: random.Random) -> int:
    return rng.randint(2, 60)


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-20, 20) for _ in range(rng.randint(3, 9))]


def _word(rng: random.Random) -> str:
    return "".join(rng.choice("abcd") for _ in range(rng.randint(4, 9)))


FAMILIES = (
    Family(lambda x, k: x * x + k, "return x * x + K", "return x * x + K + 1", _number),
    Family(
        lambda x, k: sum(each for each in range(x) if each % k == 0),
        "return sum(range(0, x, K))",
        "return sum(range(0, x + 1, 1))",
        _number,
    ),
    Family(lambda x, k: max(x) - min(x) + k, "return max(x) - min(x) + K", "return max(x) + K", _numbers),
    Family(lambda x, k: sorted(x)[: k % 3 + 2], "return sorted(x)[:K % 3 + 2]", "return sorted(x)[:K % 3 + 1]", _numbers),
    Family(
        lambda x, k: "".join(chr(97 + (ord(each) - 97 + k) % 26) for each in x),
        "return ''.join(chr(97 + (ord(c) - 97 + K) % 26) for c in x)",
        "return ''.join(chr(97 + (ord(c) - 97 + K + 1) % 26) for c in x)",
        _word,
    ),
    Family(lambda x, k: {each: x.count(each) + k for each in sorted(set(x))}, "return {c: x.count(c) + K for c in sorted(set(x))}", "return {c: x.count(c) for c in sorted(set(x))}", _word),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in one form."""

    name: str
    form: str
    row: Mapping[str, Any]
    """Columns of the row."""
    right: str
    """A program that passes."""
    mutants: Mapping[str, str]
    """Programs that do not, by what is wrong with them."""


def problems(number: int, seed: int = 0) -> Iterator[Problem]:
    """Yield problems, the forms and families in turns."""
    rng = random.Random(seed)
    for place in range(number):
        form, family = FORMS[place % 5], FAMILIES[place // 5 % len(FAMILIES)]
        k = rng.randint(2, 25)
        cases: list[tuple[Any, Any]] = []
        while len(cases) < 4:
            argument = family.argument(rng)
            if family.right(argument, k):  # neither 0 nor empty, which a broken program may give
                cases.append((argument, family.right(argument, k)))
        row = _row(form, cases)
        programs = {
            kind: _program(form, text.replace("K", str(k)))
            for kind, text in {**_mutants(family), "right": family.body}.items()
        }
        right = programs.pop("right")
        programs |= _cheats(form, right)
        yield Problem(f"{form}_{place}", form, row, right, programs)


def _mutants(family: Family) -> dict[str, str]:
    """Return bodies of wrong functions."""
    return {
        "off_by_one": family.wrong,
        "wrong_type": f"return [({family.body[7:]})]",
        "endless": "while True: pass",
        "exit": "import os; os._exit(0)",
    }


def _cheats(form: str, right: str) -> dict[str, str]:
    """Return wrong programs that do something to what might judge them."""
    broken = "def f(x): return 0\n"
    main = right[right.index("import json") :] if form == "stdin" else ""
    always = "class A:\n    def __eq__(s, o): return True\n    def __repr__(s): return '1'\n"
    return {
        "exit_at_once": "import sys\nsys.exit(0)\n" + right,
        "patched_assert": "import builtins\nbuiltins.AssertionError = Exception\n" + broken + main,
        "always_equal": f"{always}import json\njson.dumps = lambda x: '1'\ndef f(x): return A()\n{main}",
        "printed": "print('passed'); print('1 passed'); print('OK')\n" + broken + main,
    }


def _program(form: str, body: str) -> str:
    text = f"def f(x):\n    {body}\n"
    if form == "stdin":
        text += "import json\nprint(json.dumps(f(json.loads(input())), separators=(',', ':')))\n"
    return text


def _row(form: str, cases: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Return the columns of a problem."""
    if form == "stdin":
        shown = [json.dumps(expected, separators=(",", ":")) for _, expected in cases]
        inputs = [json.dumps(argument) + "\n" for argument, _ in cases]
        return {"input_output": json.dumps({"inputs": inputs, "outputs": shown})}
    if form == "calls":
        called = [{"input": json.dumps(a), "output": json.dumps(e)} for a, e in cases]
        return {
            "public_test_cases": json.dumps(
                [{**case, "testtype": "functional"} for case in called]
            ),
            "metadata": json.dumps({"func_name": "f"}),
        }
    asserts = [f"assert f({argument!r}) == {expected!r}" for argument, expected in cases]
    if form == "asserts":
        return {"test_list": asserts}
    if form == "pytest":
        tests = [f"def test_{n}():\n    {text}\n" for n, text in enumerate(asserts)]
        return {"test": "from solution import f\n\n" + "\n".join(tests)}
    return {"check_based": "\n".join(asserts)}
