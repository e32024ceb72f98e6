"""Right programs pass, wrong ones do not, whatever they do to their judge."""

# ruff: noqa: E501

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.rewards.code.asserts import judge_asserts
from roll.rewards.code.calls import judge_calls
from roll.rewards.code.rows.cases import Call
from roll.rewards.code.values import decode, encode, same
from roll.rewards.code.verdict import Kind, Verdict
from roll.sandbox import Limits, Sandbox

LIMITS = Limits(cpu_s=10, wall_s=60)
SHORT = Limits(cpu_s=0.5, wall_s=60)

RIGHT = "def f(n):\n    return sum(p for p in range(2, n) if all(p % d for d in range(2, p)))"
CALLS = [Call([10], 17), Call([20], 77), Call([3], 2)]
ASSERTS = "assert f(10) == 17\nassert f(20) == 77\ndef check(g):\n    for n, s in [(3, 2), (6, 10)]:\n        assert g(n) == s"

SPY = """
import gc, sys
def spied():
    found = []
    frame = sys._getframe()
    while frame:
        found += list(frame.f_locals.values()) + list(frame.f_globals.values())
        frame = frame.f_back
    found += gc.get_objects()
    return found
"""
CHEATS = {
    "wrong": "def f(n): return n",
    "nearly": RIGHT + " + (n == 20)",
    "wrong_type": RIGHT.replace("return ", "return str(") + ")",
    "expected_by_gc": SPY
    + "def f(n):\n    for o in spied():\n        for name in ('expected', 'answer', 'output', 'outputs', 'target'):\n            if type(o) is dict and name in o: return o[name]\n            if hasattr(o, name): return getattr(o, name)\n    return 0",
    "expected_by_text": SPY
    + "import re\ndef f(n):\n    for o in spied():\n        text = str(o)[:5000] if type(o) in (str, dict, list) else ''\n        m = re.search(r'f\\(%d\\) == (\\d+)' % n, text) or re.search(r'expected\\D+(\\d+)', text)\n        if m: return int(m[1])\n    return 0",
    "always_equal_int": "class I(int):\n    def __eq__(s, o): return True\n    __hash__ = int.__hash__\ndef f(n): return I(1)",
    "always_equal": "class A:\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\ndef f(n): return A()",
    "any": "from unittest.mock import ANY\ndef f(n): return ANY",
    "says_it_is_int": "class A:\n    __class__ = int\n    def __eq__(s, o): return True\ndef f(n): return A()",
    "text_that_equals": "class S(str):\n    def __eq__(s, o): return True\n    __hash__ = str.__hash__\ndef f(n): return S('17')",
    "not_a_number": "def f(n): return float('nan')",
    "generator": "def f(n): yield 17",
    "function": "def f(n): return f",
    "exit_at_once": "import os\nos._exit(0)",
    "exit_in_call": "import os\ndef f(n): os._exit(0)",
    "sys_exit": "import sys\nsys.exit(0)",
    "sys_exit_in_call": "import sys\ndef f(n): sys.exit(0)",
    "stop_iteration": "def f(n): raise StopIteration(17)",
    "assertion_error": "def f(n): raise AssertionError",
    "base_exception": "def f(n): raise KeyboardInterrupt",
    "exit_hook": "import atexit, os\natexit.register(lambda: (print('passed'), os._exit(0)))\ndef f(n): return 0",
    "closed_output": "import os\nos.close(1)\ndef f(n): return 0",
    "printed": 'def f(n):\n    print(17); print(\'ok\'); print(\'{"value": ["int", "0x11"]}\')\n    return 0',
    "patched_dumps": "import json\njson.dumps = lambda *a, **k: 'true'\ndef f(n): return 0",
    "patched_encode": SPY
    + "for o in spied():\n    if type(o) is dict and 'encode' in o: o['encode'] = lambda v, d=0: True\ndef f(n): return 0",
    "patched_same": SPY
    + "for o in spied():\n    if type(o) is dict:\n        for name in ('same', 'decode', 'answer', 'judged', 'bool'):\n            if name in o: o[name] = lambda *a: True\ndef f(n): return 0",
    "patched_builtins": "import builtins\nbuiltins.bool = lambda x: True\nbuiltins.all = builtins.any = lambda x: True\nbuiltins.AssertionError = Exception\ndef f(n): return 0",
    "forged_twice": SPY
    + "import re, os\ndef f(n):\n    for o in spied():\n        for mark in re.findall(r'[0-9a-f]{32}', str(o)[:3000] if type(o) in (str, dict) else ''):\n            for place in range(4):\n                os.write(1, f'\\n{mark}{place}:{{\"value\": [\"int\", \"0x0\"]}}{mark}\\n'.encode())\n    return 0",
    "forged_judgement": SPY
    + "import re, os\nfor o in spied():\n    for mark in re.findall(r'[0-9a-f]{32}', str(o)[:3000] if type(o) in (str, dict) else ''):\n        os.write(1, f'\\n{mark}0:{{\"judged\": [true, true, true, true], \"why\": \"\"}}{mark}\\n'.encode())\ndef f(n): return 0",
    "killed_parent": "import os, signal\ndef f(n):\n    os.kill(os.getppid() or 1, 9)\n    return 0",
    "silent_thread": "import threading, os\nthreading.Thread(target=lambda: os._exit(0)).start()\ndef f(n): return 0",
    "output_replaced": "import io, sys\nsys.stdout = sys.stderr = io.StringIO()\ndef f(n): return 0",
    "shadowed_name": "f = type('F', (), {'__call__': lambda s, n: 0, '__eq__': lambda s, o: True})()",
    "no_function": "x = 1",
    "no_python": "def f(n) return 0",
    "frames_of_the_judge": SPY
    + "def f(n):\n    frame = sys._getframe()\n    while frame:\n        for v in [*frame.f_locals.values()]:\n            if type(v) is int and v > 1: return v + n - n\n        frame = frame.f_back\n    return 0",
    "empty": "",
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(workers=2, limits=LIMITS) as made:
        yield made


def by_calls(sandbox: Sandbox, program: str, calls: list[Call] | None = None) -> list[Verdict]:
    return asyncio.run(judge_calls(sandbox, program, "f", calls or CALLS))


def by_asserts(sandbox: Sandbox, program: str, tests: str = ASSERTS) -> list[Verdict]:
    return asyncio.run(judge_asserts(sandbox, program, tests, "f"))


def test_a_right_program_passes(sandbox: Sandbox) -> None:
    assert [each.kind for each in by_calls(sandbox, RIGHT)] == [Kind.PASSED] * 3
    assert [each.kind for each in by_asserts(sandbox, RIGHT)] == [Kind.PASSED] * 4
    noisy = "import sys\nprint('x' * 1000)\nprint('\\n', end='')\n" + RIGHT
    assert all(each.passed for each in by_calls(sandbox, noisy) + by_asserts(sandbox, noisy))


@pytest.mark.parametrize("name", sorted(CHEATS))
def test_a_wrong_program_does_not_pass_whatever_it_does(name: str, sandbox: Sandbox) -> None:
    assert len(CHEATS) > 30
    called, asserted = by_calls(sandbox, CHEATS[name]), by_asserts(sandbox, CHEATS[name])
    if name == "nearly":
        assert [each.passed for each in called] == [True, False, True]
        assert [each.passed for each in asserted] == [True, False, True, True]
    else:
        assert not any(each.passed for each in called), called
        assert not any(each.passed for each in asserted), asserted


def test_a_call_must_return_the_exact_type_and_an_assert_means_what_it_says(
    sandbox: Sandbox,
) -> None:
    program = RIGHT.replace("return ", "return float(") + ")"
    assert [each.kind for each in by_calls(sandbox, program)] == [Kind.WRONG] * 3
    assert all(each.passed for each in by_asserts(sandbox, program))  # 17.0 == 17
    exact = by_asserts(sandbox, program, "assert type(f(10)) is int")
    assert [each.kind for each in exact] == [Kind.WRONG]


def test_a_case_that_fails_leaves_the_others(sandbox: Sandbox) -> None:
    program = RIGHT + "\ng = f\ndef f(n):\n    if n == 20: raise ValueError('no')\n    return g(n)"
    assert [each.kind for each in by_calls(sandbox, program)] == ["passed", "raised", "passed"]
    asserted = by_asserts(sandbox, program)
    assert [each.kind for each in asserted] == ["passed", "raised", "passed", "passed"]
    assert asserted[1].why == "ValueError: no"


def test_an_endless_call_is_timed_out(sandbox: Sandbox) -> None:
    program = "def f(n):\n    while True: pass"
    called = asyncio.run(judge_calls(sandbox, program, "f", CALLS, SHORT))
    asserted = asyncio.run(judge_asserts(sandbox, program, ASSERTS, "f", SHORT))
    assert {each.kind for each in called + asserted} == {Kind.TIMED_OUT}


def test_a_method_of_a_class_solution_is_found(sandbox: Sandbox) -> None:
    program = "class Solution:\n    def f(self, a, b):\n        return (a, [b])"
    assert by_calls(sandbox, program, [Call([1, 2], [1, [2]])])[0].passed
    assert not by_calls(sandbox, program, [Call([1, 2], [1, 2])])[0].passed


@pytest.mark.parametrize(
    ("program", "tests", "passed"),
    [
        ("def f(x): x.append(1)", "a = []\nf(a)\nassert a == [1]", [True]),
        ("def f(x): return x + [1]", "a = []\nf(a)\nassert a == [1]", [False]),
        ("def f(x): return {1: (2, {3})}", "assert f(0) == {1: (2, {3})}", [True]),
        (
            "def f(x): raise KeyError('a')",
            "try:\n    f(1)\nexcept KeyError:\n    assert True",
            [True],
        ),
        (
            "class A:\n    def __init__(s): s.n = 0\n    def add(s): s.n += 1; return s.n",
            "a = A()\na.add()\nassert a.add() == 2\nassert A().add() == 1",
            [True, True],
        ),
        ("def f(x): return 10**5000", "assert f(1) == 10**5000", [True]),
        (
            "def g(x): return x\ndef f(x): return -g(x)",
            "import math\nassert math.isclose(f(2.0), -2)\nassert g(1) == 1",
            [True, True],
        ),
        # Ends the loop: what is behind it was never asked.
        (
            "n = iter([1])\ndef f(x): return next(n)",
            "for a, b in zip(map(f, [1, 2]), [1, 2]):\n    assert a == b",
            [True, False],
        ),
        ("def f(x): return x", "if False:\n    assert f(1) == 1", [False]),
        ("def f(x): return x", "assert f(1) == 1\nraise SystemExit", [True, False]),
    ],
)
def test_tests_of_many_forms(
    program: str, tests: str, passed: list[bool], sandbox: Sandbox
) -> None:
    assert [each.passed for each in by_asserts(sandbox, program, tests)] == passed


def test_tests_without_an_assert_are_refused(sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match="expected at least one assert, found none"):
        by_asserts(sandbox, RIGHT, "f(1)")
    with pytest.raises(ValueError, match="tests: no Python"):
        by_asserts(sandbox, RIGHT, "assert f(")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
)


@given(plain)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    assert same(value, decode(encode(value)))


@pytest.mark.parametrize(
    ("expected", "found"),
    [(1, True), (1, 1.0), ([1], (1,)), ("1", 1), ({"a": 1}, {"a": 1.0}), (None, 0), ({1}, [1])],
)
def test_equal_values_of_other_types_are_not_the_same(expected: Any, found: Any) -> None:
    assert not same(expected, found)
    assert same(expected, expected)


def test_what_is_no_number_is_the_same_as_itself() -> None:
    assert same([math.nan], [math.nan])
    assert not same([math.nan], [1.0])


@pytest.mark.parametrize("text", ["", "[", '["int", "x"]', '["os", "1"]', "[1]", '["dict", 1]'])
def test_other_text_is_no_value(text: str) -> None:
    with pytest.raises(ValueError):
        decode(text)
