"""Tests that compare by operators, or by helpers, are not deceived by what a program defines."""

# ruff: noqa: E501

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from roll.core.types import Sample
from roll.rewards.code.reward import code_reward
from roll.rewards.code.running.sandboxes import LimitSettings, SandboxSettings
from roll.rewards.contract import sample_of
from roll.sandbox import SandboxError

TWO = SandboxSettings(workers=2)
LIMITS = LimitSettings(cpu_s=5, wall_s=120)

RIGHT = "def f(n):\n    if type(n) is str: return '17'\n    if type(n) is set: return {17}\n    return sum(p for p in range(2, n) if all(p % d for d in range(2, p)))\n"
OBJECT = """
class A:
    def __sub__(s, o): return s.value()
    __rsub__ = __add__ = __radd__ = __mod__ = __xor__ = __truediv__ = __sub__
    def value(s): return 0
    def __abs__(s): return 0
    def __neg__(s): return 0
    def __int__(s): return 0
    def __float__(s): return 0.0
    def __len__(s): return 0
    def __bool__(s): return False
    def __getattr__(s, n):
        if n[:2] == "__": raise AttributeError(n)
        return lambda *a: True
    def __lt__(s, o): return True
    __le__ = __gt__ = __ge__ = __eq__ = __lt__
    __hash__ = object.__hash__
"""
LENIENT = {
    "object": OBJECT + "def f(n): return A()",
    "object_of_object": OBJECT.replace("return s.value()", "return A()") + "def f(n): return A()",
    "class": OBJECT.replace("class A:", "class f:\n    def __init__(s, n=0): pass"),
    "float": "class A(float):\n    def __sub__(s, o): return 0.0\n    __rsub__ = __sub__\ndef f(n): return A(1)",
    "module": "class math:\n    isclose = staticmethod(lambda *a, **k: True)\n    fabs = staticmethod(lambda x: 0.0)\ndef f(n): return 0.0",
    "helper": "def off(*a): return 0\ndef f(n): return 0",
}
TESTS: dict[str, dict[str, Any]] = {
    "abs": {"test_list": ["assert abs(f(10) - 17) < 1e-6"]},
    "zero": {"test_list": ["assert f(10) - 17 == 0"]},
    "reflected": {"test_list": ["assert 17 - f(10) == 0"]},
    "negative": {"test_list": ["assert -17 + f(10) == 0"]},
    "negated": {"test_list": ["assert -(f(10) - 17) == 0"]},
    "false": {"test_list": ["assert not (f(10) - 17)"]},
    "exclusive": {"test_list": ["assert f(10) ^ 17 == 0"]},
    "float": {"test_list": ["assert abs(float(f(10) - 17)) < 1e-6"]},
    "between": {"test_list": ["assert 16 < f(10) < 18"]},
    "begin": {"test_list": ["assert f('x').startswith('17')"]},
    "subset": {"test_list": ["assert f({10}).issubset({17, 18}) and f({10}).isdisjoint({5})"]},
    "free_module": {"test_list": ["assert math.isclose(f(10), 17)"]},
    "free_fabs": {"test_list": ["assert math.fabs(f(10) - 17) < 1e-6"]},
    "helper": {
        "prompt": "import math\ndef off(a, b):\n    return math.fabs(a - b)\n\ndef f(n):\n    '''Sum of primes.'''\n",
        "entry_point": "f",
        "test": "def check(candidate):\n    assert off(candidate(10), 17) == 0\n",
    },
    "unittest": {
        "test": "import unittest\nfrom solution import f\nclass TestF(unittest.TestCase):\n"
        "    def setUp(self): self.n = 10\n"
        "    def test_a(self): self.assertAlmostEqual(f(self.n), 17)\n"
        "    def test_b(self): self.assertEqual(f(20), 77)\n"
    },
    "approx": {
        "test": "import pytest\nfrom solution import f\ndef test_a(): assert f(10) == pytest.approx(17)\n"
    },
    "check": {"check_based": "assert abs(f(10) - 17) < 1e-6"},
}


def scores(row: dict[str, Any], programs: list[str], **kwargs: Any) -> list[float]:
    samples: list[Sample] = [sample_of(each, answer="", extra=row) for each in programs]

    async def found() -> list[float]:
        judged = [
            code_reward(each, limits=LIMITS, sandbox=TWO, score="share", **kwargs)
            for each in samples
        ]
        return [each.score for each in await asyncio.gather(*judged)]

    return asyncio.run(found())


@pytest.mark.parametrize("form", TESTS)
def test_only_the_right_number_passes(form: str) -> None:
    first, *others = scores(TESTS[form], [RIGHT, *LENIENT.values()])
    assert first == 1.0
    assert {name: got for name, got in zip(LENIENT, others, strict=True) if got} == {}


VECTOR = """
class V:
    def __init__(s, x, y): s.x, s.y = x, y
    def __add__(s, o): return V(s.x + o.x, s.y + o.y)
    def __mul__(s, k): return V(s.x * k, s.y * k)
    def __matmul__(s, o): return s.x * o.x + s.y * o.y
    def __neg__(s): return V(-s.x, -s.y)
    def __str__(s): return f"({s.x}, {s.y})"
    def __len__(s): return 2
"""


def test_operators_of_a_class_can_be_tested() -> None:
    tests = [
        "a, b = V(1, 2), V(3, 4)",
        "assert (a + b).y == 6",
        "assert str(a * 2) == '(2, 4)'",
        "assert (-(a * 2 + b)).x == -5",
        "assert len(a) == 2",
    ]
    right, wrong = scores({"test_list": tests}, [VECTOR, VECTOR.replace("s.y + o.y", "s.y")])
    assert (right, wrong) == (1.0, 0.75)


FORGE = """
import gc, os, re, sys
def marks():
    found, frame = [], sys._getframe()
    while frame:
        found += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    for each in found + gc.get_objects():
        if type(each) in (str, dict, list):
            yield from re.findall(r'[0-9a-f]{32}', str(each)[:5000])
def f(n):
    for mark in set(marks()):
        for place in range(4):
            os.write(1, f'\\n{mark}{place}:{VALUE}{mark}\\n'.encode())
    os._exit(0)
"""
COLLIDE = "', '.join('[\"int\", \"' + hex(k * (2**61 - 1)) + '\"]' for k in range(1, 30000))"
FORGED = {
    "deep": """'{"value": ' + '["list", [' * 150 + ']]' * 150 + '}'""",
    "deeper": """'{"value": ' + '[' * 30000 + ']' * 30000 + '}'""",
    "text": """'"raised"'""",
    "raised": """'{"raised": 5}'""",
    "collisions": f"""'{{"value": ["set", [' + {COLLIDE} + ']]}}'""",
    "collisions_of_keys": f"""'{{"value": ["dict", [' + {COLLIDE.replace("'[", "'[[").replace("']'", "'], 0]'")} + ']]}}'""",
    "after": """'{"value": 0, "after": 3}'""",
}
FORMS: dict[str, dict[str, Any]] = {
    "calls": {"tests": {"fn_name": "f", "inputs": [[10], [20]], "outputs": [17, 77]}},
    "asserts": {"test_list": ["assert f(10) == 17"]},
}


@pytest.mark.parametrize("form", FORMS)
def test_no_forged_result_makes_the_judge_fail_or_take_long(form: str) -> None:
    programs = [f"VALUE = {value}\n{FORGE}" for value in FORGED.values()]
    assert scores(FORMS[form], programs) == [0.0] * len(programs)


def test_decoding_takes_no_long_time_for_chosen_keys() -> None:
    from roll.rewards.code.values import decode

    items = ", ".join(f'["int", "{hex(k * (2**61 - 1))}"]' for k in range(1, 2000))
    for kind in ("set", "frozenset", "dict_keys"):
        with pytest.raises(ValueError, match="keys have one hash"):
            decode(f'["{kind}", [{items}]]')
    pairs = items.replace("[", "[[").replace("]", "], null]")
    for kind in ("dict", "Counter", "OrderedDict"):
        with pytest.raises(ValueError, match="keys have one hash"):
            decode(f'["{kind}", [{pairs}]]')


CHECKER = "def check(input, output, expected):\n    a, b = map(int, output.split())\n    return a + b == int(input)"


def test_a_checker_that_fails_on_an_output_refuses_it() -> None:
    row = {"tests": {"inputs": ["5"], "outputs": ["0 5"]}, "checker": CHECKER}
    programs = ["print(1, int(input()) - 1)", "print('x')", "print()", "print('1 ' * 9999)"]
    assert scores(row, programs, compare="checker") == [1.0, 0.0, 0.0, 0.0]
    broken = {**row, "checker": CHECKER.replace("int(input)", "int(nothing)")}
    with pytest.raises(SandboxError, match="failed on the right output"):
        scores(broken, programs[:1], compare="checker")
