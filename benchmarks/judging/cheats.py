"""Wrong programs that attack their judge, and a problem in each form that they try to pass.

The function `f` should return the sum of the primes below its argument; as a program, it prints it.
"""

# ruff: noqa: E501

from __future__ import annotations

import json
from typing import Any

_RIGHT = "def f(n):\n    return sum(p for p in range(2, n) if all(p % d for d in range(2, p)))\n"
_ASSERTS = ["assert f(10) == 17", "assert f(20) == 77"]

ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "stdin": (
        {"input_output": json.dumps({"inputs": ["10\n", "20\n"], "outputs": ["17\n", "77\n"]})},
        _RIGHT + "print(f(int(input())))",
    ),
    "calls": (
        {"tests": {"fn_name": "f", "inputs": [[10], [20]], "outputs": [17, 77]}},
        _RIGHT,
    ),
    "asserts": ({"test_list": _ASSERTS}, _RIGHT),
    "pytest": (
        {
            "test": "import pytest\nfrom solution import f\n"
            "def test_a(): assert f(10) == 17\n"
            "@pytest.mark.parametrize('n', [20])\ndef test_b(n): assert f(n) == 77\n"
        },
        _RIGHT,
    ),
    "check": ({"check_based": "\n".join(_ASSERTS)}, _RIGHT),
}
"""Columns of the row, and a right program, by form."""

_SPY = """
import gc, os, re, sys
def spied():
    found, frame = [], sys._getframe()
    while frame:
        found += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    return found + gc.get_objects()
def marks():
    for each in spied():
        if type(each) in (str, dict, list):
            yield from re.findall(r'[0-9a-f]{32}', str(each)[:5000])
"""

CHEATS = {
    "constant": "def f(n): return 0\nprint(0)",
    "expected_by_gc": _SPY
    + "def f(n):\n    for o in spied():\n        for name in ('expected', 'output', 'outputs', 'answer', 'right'):\n"
    "            if type(o) is dict and name in o: return o[name]\n    return 0\nprint(f(1))",
    "expected_by_text": _SPY
    + "def f(n):\n    for o in spied():\n        text = str(o)[:5000] if type(o) in (str, dict, list, bytes) else ''\n"
    "        m = re.search(r'f.%s. == .?(\\d+)' % n, text) or re.search(r'expected\\D+(\\d+)', text)\n"
    "        if m: return int(m[1])\n    return 0\nprint(f(10))",
    "always_equal_int": "class I(int):\n    def __eq__(s, o): return True\n    __hash__ = int.__hash__\n"
    "def f(n): return I(1)\nprint(I(1))",
    "always_equal": "class A:\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n"
    "    def __bool__(s): return True\ndef f(n): return A()\nprint(A())",
    "any": "from unittest.mock import ANY\ndef f(n): return ANY\nprint(ANY)",
    "says_it_is_int": "class A:\n    __class__ = int\n    def __eq__(s, o): return True\ndef f(n): return A()",
    "always_equal_namedtuple": "import collections\nN = collections.namedtuple('N', 'a')\n"
    "N.__eq__ = lambda s, o: True\ndef f(n): return N(1)",
    "exit_0": "import os\nos._exit(0)",
    "sys_exit_0": "import sys\nsys.exit(0)",
    "exit_in_call": "import os\ndef f(n): os._exit(0)",
    "sys_exit_in_call": "import sys\ndef f(n): sys.exit(0)",
    "exit_hook": "import atexit, os\natexit.register(lambda: (print('17'), os._exit(0)))\ndef f(n): return 0",
    "exit_thread": "import threading, os\nthreading.Thread(target=lambda: os._exit(0)).start()\ndef f(n): return 0",
    "closed_output": "import os\nos.close(1)\ndef f(n): return 0",
    "closed_all": "import os\nos.closerange(0, 200)\ndef f(n): return 0",
    "output_replaced": "import io, sys\nsys.stdout = sys.stderr = io.StringIO()\ndef f(n): return 0\nprint(17)",
    "printed_verdict": "print('passed'); print('OK'); print('1 passed in 0.01s')\n"
    "def f(n):\n    print('17\\n77'); return 0",
    "both_outputs": "print(17); print(77)\ndef f(n): return [17, 77]",
    "patched_assert": "import builtins\nbuiltins.AssertionError = Exception\nbuiltins.bool = lambda x: True\n"
    "builtins.all = builtins.any = lambda x: True\ndef f(n): return 0",
    "patched_json": "import json\njson.dumps = json.loads = lambda *a, **k: {'value': ['int', '0x11']}\n"
    "def f(n): return 0",
    "patched_pytest": "import sys, types\nfake = types.ModuleType('pytest')\nfake.main = lambda *a, **k: 0\n"
    "sys.modules['pytest'] = sys.modules['unittest'] = fake\ndef f(n): return 0",
    "patched_frames": _SPY + "for o in spied():\n    if type(o) is dict:\n"
    "        for name in ('same', 'encode', 'decode', 'answer', 'judged', 'tell', 'do', 'results'):\n"
    "            if name in o: o[name] = lambda *a, **k: True\ndef f(n): return 0",
    "traced": "import sys\ndef trace(frame, event, arg):\n    for name in ('expected', 'judged', 'verdict'):\n"
    "        if name in frame.f_locals: print(frame.f_locals[name])\n    return trace\nsys.settrace(trace)\n"
    "def f(n): return 0",
    "profiled": "import sys\nsys.setprofile(lambda frame, event, arg: frame.f_locals.update(value=1, told=1))\n"
    "def f(n): return 0",
    "read_harness_input": "import os, re, sys\nos.lseek(0, 0, 0)\ntext = os.read(0, 10**6).decode()\n"
    "m = re.findall(r'(?:expected|outputs?)\\D{0,20}(\\d+)', text)\ndef f(n): return int(m[0]) if m else 0\n"
    "print(m[0] if m else 0)",
    "read_files": "import glob, re\ntexts = []\nfor p in glob.glob('*') + glob.glob('/tmp/**', recursive=True):\n"
    "    try: texts.append(open(p).read())\n    except Exception: pass\n"
    "m = re.findall(r'== (\\d+)', ' '.join(texts))\ndef f(n): return int(m[0]) if m else 0",
    "forged_results": _SPY
    + "def f(n):\n    for mark in set(marks()):\n        for place in range(4):\n"
    '            os.write(1, f\'\\n{mark}{place}:{{"value": ["int", "0x0"]}}{mark}\\n\'.encode())\n    return 0',
    "forged_judgement": _SPY + "for mark in set(marks()):\n"
    '    os.write(1, f\'\\n{mark}0:{{"judged": [true, true], "why": ""}}{mark}\\n\'.encode())\ndef f(n): return 0',
    "killed_parent": "import os\ndef f(n):\n    os.kill(os.getppid() or 1, 9)\n    return 0",
    "assertion_error": "def f(n): raise AssertionError",
    "skipped": "import unittest\nclass Skipped(Exception): pass\ndef f(n): raise unittest.SkipTest('skip')",
    "stop_iteration": "def f(n): raise StopIteration(17)",
    "base_exception": "def f(n): raise KeyboardInterrupt",
    "exception_class": "class f(Exception):\n    def __eq__(s, o): return True",
    "generator": "def f(n): yield 17",
    "coroutine": "async def f(n): return 0",
    "function_itself": "def f(n): return f",
    "not_a_number": "def f(n): return float('nan')\nprint('nan')",
    "shadowed_name": "f = type('F', (), {'__call__': lambda s, n: 0, '__eq__': lambda s, o: True})()",
    "hostile_deepness": "import os\ndef f(n):\n    x = []\n    for _ in range(99): x = [x]\n    return x",
}
"""Wrong programs by what they try."""
