"""The `code` reward: every form of cases, every score, and every kind of failure."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import Any

import pytest

from roll.core.errors import ConfigError, DataError
from roll.rewards.api import Reward, RewardContext
from roll.rewards.code.reward import code_reward
from roll.rewards.code.running.languages import LANGUAGES
from roll.rewards.contract import check_reward, sample_of
from roll.rewards.loading import load_reward

# ruff: noqa: E501

ADD = "a, b = map(int, input().split())\nprint(a + b)"
TEXTS = {
    "tests": {"inputs": ["1 2\n", "5 6\n", "0 0\n", "7 8\n"], "outputs": ["3", "11", "0", "15"]}
}
CALLS = {"tests": {"fn_name": "add", "inputs": [[1, 2], [5, 6]], "outputs": [[3], [11]]}}
SHORT = {"cpu_s": 0.5}


def score(program: str, row: dict[str, Any], **kwargs: Any) -> Reward:
    bound = load_reward("code", kwargs, RewardContext("code", seed=0))
    sample = sample_of(program, answer="", extra=row)
    reward = bound.result(sample, asyncio.run(bound.call(sample)))
    assert isinstance(reward, Reward)
    return reward


def test_a_right_program_passes_and_a_wrong_one_does_not() -> None:
    right = score(f"<think>hm</think>Here:\n```python\n{ADD}\n```\nDone.", TEXTS)
    assert right.score == 1.0
    assert right.parts == {
        "compiled": 1, "passed": 1, "wrong": 0, "raised": 0, "timed_out": 0, "memory": 0, "crashed": 0,
    }  # fmt: skip
    assert score(ADD.replace("+", "-"), TEXTS).score == 0.0
    assert score("def add(a, b): return a + b", CALLS).score == 1.0
    assert (
        score("class Solution:\n    def add(self, a: int, b: List[int]): return a + b", CALLS).score
        == 1.0
    )
    assert score("def add(a, b): return [a + b]", CALLS).score == 0.0


def test_scores() -> None:
    program = "a, b = map(int, input().split())\nprint(a + b if a != 5 else 0)"
    assert score(program, TEXTS).score == 0.0
    assert score(program, TEXTS, score="share").score == 0.75
    assert score(program, TEXTS, score="first_failure").score == 0.25
    assert score(program, TEXTS, score="share", stop=True).score == 0.25
    assert score("def add(a, b): return 3", CALLS, score="share").score == 0.5


@pytest.mark.parametrize(
    ("program", "part"),
    [
        ("print(", None),
        ("", None),
        ("<think>never", None),
        ("```cpp\nint main() {}\n```", None),
        ("long", None),
        ("print(1)\nraise ValueError", "raised"),
        (ADD + "\nimport sys\nsys.exit(1)", "raised"),
        ("while True: pass", "timed_out"),
        ("x = [0]\nwhile True: x += x", "memory"),
        ("import os\nos.abort()", "crashed"),
        ("while True: print('x' * 9999)", "crashed"),
        ("import os\nos._exit(0)", "wrong"),
    ],
)
def test_parts_say_how_a_program_failed(program: str, part: str | None) -> None:
    row = {"tests": {"inputs": ["1 2\n"], "outputs": ["3"]}}
    # To fetch all of its memory takes a program CPU time, on a busy machine much of it.
    limits = {"cpu_s": 20} if part == "memory" else SHORT
    found = score("x" * 1_000_001 if program == "long" else program, row, limits=limits)
    assert found.score == 0.0
    assert found.parts["compiled"] == float(part is not None)
    assert {name for name, value in found.parts.items() if value} == (
        {"compiled", part} if part else set()
    )


def test_each_call_has_the_whole_limit() -> None:
    program = (
        "import time\ndef add(a, b):\n    while time.process_time() < 0.35: pass\n    return a + b"
    )
    slow = program.replace("< 0.35", "- t < 0.35").replace(
        "    while", "    t = time.process_time()\n    while"
    )
    assert score(slow, CALLS, limits=SHORT).score == 1.0
    assert score(slow.replace("0.35", "9"), CALLS, limits=SHORT).parts["timed_out"] == 1.0


def test_a_call_is_not_judged_by_what_earlier_calls_left() -> None:
    assert (
        score(
            "seen = []\ndef add(a, b):\n    seen.append(a + b)\n    return sum(seen)", CALLS
        ).score
        == 1.0
    )
    assert (
        score("def add(a, b):\n    if a == 1: exit()\n    return a + b", CALLS, score="share").score
        == 0.5
    )


def test_a_program_gains_nothing_by_its_end() -> None:
    """Right for 1, wrong for 2 to 4: what it does at 5 takes back no failure."""
    row = {"test_list": [f"assert f({n}) == 1" for n in range(1, 9)]}
    ends = {"return 2": "wrong", "exit()": "crashed", "while True: pass": "timed_out"}
    for end, kind in ends.items():
        program = f"def f(n):\n    if n == 5:\n        {end}\n    return n if n < 5 else 2"
        found = score(program, row, score="share", limits=SHORT)
        assert found.score == 1 / 8, end
        assert found.parts["wrong"] == (7 / 8 if kind == "wrong" else 3 / 8)
        assert found.parts[kind] >= 4 / 8
    file = (
        "import pytest\n@pytest.mark.parametrize('n', range(1, 9))\ndef test_f(n): assert f(n) == 1"
    )
    program = "def f(n):\n    if n == 5: exit()\n    return n"
    assert score(program, {"test": file}, score="share").score == 1 / 8
    assert score(program, {"test": file}, score="share").parts["crashed"] == 4 / 8


def test_cases_behind_a_failure_count_in_every_form() -> None:
    """Asserts and pytest files as cases of text: the second of four fails."""
    asserts = {"test_list": [f"assert f({n}) == {n}" for n in range(4)]}
    file = "import pytest\n@pytest.mark.parametrize('n', range(4))\ndef test_f(n): assert f(n) == n"
    for row in (asserts, {"test": file}):
        program = "def f(n): return 7 if n == 1 else n"
        assert score(program, row, score="first_failure").score == 0.25
        assert score(program, row, score="share", stop=True).score == 0.25
        assert score(program, row, score="share").score == 0.75
        assert score("def f(n): return n", row, stop=True).score == 1.0


PYTEST = """
import pytest
from solution import BankError, Account, LIMIT, greet, add

@pytest.fixture
def account(): return Account(5)

@pytest.mark.parametrize(("a", "b", "c"), [(1, 2, 3), (4, 5, 9)])
def test_add(a, b, c): assert add(a, b) == c

def test_raises():
    with pytest.raises(BankError, match="too much"):
        Account(1).take(2)
    with pytest.raises(TypeError): add("x", None)

class TestAccount:
    def test_balance(self, account):
        account.take(2)
        assert account.balance == 3 and len(account) == 3 and str(account) == "A3"
        assert LIMIT == 7 and isinstance(account, Account)

def test_print(capsys):
    greet()
    assert capsys.readouterr().out == "hi\\n"
"""
BANK = """
class BankError(Exception): pass
LIMIT = 7
def greet(): print("hi")
def add(a, b): return a + b
class Account:
    def __init__(self, balance): self.balance = balance
    def take(self, n):
        if n > self.balance: raise BankError("too much")
        self.balance -= n
    def __len__(self): return self.balance
    def __str__(self): return f"A{self.balance}"
"""


def test_a_pytest_file_tests_a_program_that_it_never_meets() -> None:
    assert score(BANK, {"test": PYTEST}).score == 1.0
    assert score(BANK.replace("a + b", "a - b"), {"test": PYTEST}, score="share").score == 0.6
    for cheat in (
        "import os\nos._exit(0)",
        "import pytest\npytest.main = lambda *a, **k: 0\n" + BANK.replace("a + b", "0"),
        "import builtins\nbuiltins.AssertionError = Exception\n" + BANK.replace("7", "8"),
        BANK.replace("BankError(Exception)", "BankError(BaseException)"),
        BANK.replace("-= n", "-= n; import os; os._exit(0)"),
    ):
        assert score(cheat, {"test": PYTEST}).score == 0.0


CHECK = """
import random
for _ in range(3):
    a, b = random.randint(0, 9), random.randint(0, 9)
    first, second = map(int, run_solution(f"{a + b}\\n").split())
    assert first + second == a + b
"""


def test_a_row_has_a_program_of_its_own() -> None:
    assert score("print(0, input())", {"check_based": CHECK}).score == 1.0
    assert score("print(1, 1)", {"check_based": CHECK}).score == 0.0
    assert score("import os\nos._exit(0)", {"check_based": CHECK}).score == 0.0
    assert score("while True: pass", {"check_based": CHECK}, limits=SHORT).parts["timed_out"] == 1.0
    never = {"check_based": "assert True"}
    assert score("print(0, input())", never).score == 0.0, "nothing was asked"
    sorts = {"check_based": "assert sort([2, 1]) == [1, 2]\nassert sort([]) == []"}
    assert score("sort = sorted", sorts).score == 1.0
    assert score("def sort(x): return x", sorts).score == 0.0


@pytest.mark.parametrize(
    "checker",
    [
        "def check(input, output, expected):\n    a, b = map(int, output.split())\n    return a + b == int(input)",
        "import sys\na = open(sys.argv[1]).read()\nb = open(sys.argv[2]).read()\n"
        "sys.exit(sum(map(int, b.split())) != int(a))",
        "import sys\nprint(sum(map(int, open('output.txt').read().split())) == int(open('input.txt').read()) and 1 or 0)",
    ],
)
def test_a_checker_decides_where_several_outputs_are_right(checker: str) -> None:
    row = {"tests": {"inputs": ["5", "9"], "outputs": ["0 5", "0 9"]}, "checker": checker}
    assert score("print(1, int(input()) - 1)", row, compare="checker").score == 1.0
    assert score("print(1, int(input()))", row, compare="checker").score == 0.0
    assert score("print(1, int(input()) - 1)", row).score == 0.0
    with pytest.raises(DataError, match="no column `checker`"):
        score("print(1)", {**TEXTS}, compare="checker")


def test_a_program_of_human_eval_continues_its_prompt_or_repeats_it() -> None:
    row = {
        "prompt": 'from typing import List\n\ndef inc(x: List[int]) -> List[int]:\n    """Add one."""\n',
        "test": "def check(candidate):\n    assert candidate([1, 2]) == [2, 3]\n    assert candidate([]) == []\n",
        "entry_point": "inc",
    }
    assert score("    return [i + 1 for i in x]", row).score == 1.0
    assert (
        score("```python\ndef inc(x: List[int]):\n    return [i + 1 for i in x]\n```", row).score
        == 1.0
    )
    assert score("def inc(x): return x", row, score="share").score == 0.5


def test_no_response_breaks_it() -> None:
    cases = json.dumps(TEXTS["tests"])
    check_reward(code_reward, answer=cases, extra={"tests": cases})


@pytest.mark.slow
@pytest.mark.parametrize("language", [name for name in LANGUAGES if name != "python"])
def test_other_languages(language: str) -> None:
    row = LANGUAGES[language]
    if not all(map(shutil.which, row.tools)):
        with pytest.raises(ConfigError, match=f"programs in {language} need its tools"):
            score(row.hello, TEXTS, language=language)
        return
    answer = f"```{row.labels[-1]}\n{row.hello}\n```"
    assert score(answer, TEXTS, language=language, sandbox={"workers": 2}).score == 1.0
    wrong = (
        answer.replace("a + b", "a - b")
        .replace("nt() + ", "nt() - ")
        .replace(".sum::<i64>()", ".max().unwrap()")
    )
    assert score(wrong, TEXTS, language=language, sandbox={"workers": 2}).score == 0.0
    broken = score(
        f"```{row.labels[0]}\n(((\n```", TEXTS, language=language, sandbox={"workers": 2}
    )
    assert broken.parts["compiled"] == 0.0


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="which only the level `namespaces` allows"):
        score("", TEXTS, language="shell", sandbox={"level": "strict"})
    with pytest.raises(DataError, match="judged in Python only"):
        score("echo 1", CALLS, language="shell")
    with pytest.raises(DataError, match="tests: no Python"):
        score("print(1)", {"test_list": ["assert f("]})
    with pytest.raises(ConfigError, match=r"kwargs.limits.cpu"):
        score("", TEXTS, limits={"cpu": 3})
