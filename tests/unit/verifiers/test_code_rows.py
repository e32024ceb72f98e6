"""Programs are found in responses, and cases in the columns of known data sets."""

# ruff: noqa: E501

from __future__ import annotations

import base64
import gzip
import json
import os
import pickle
import zlib
from typing import Any

import pytest

from roll.core.errors import DataError
from roll.rewards.code.outputs import Comparison, same_output
from roll.rewards.code.rows.answer import program_of
from roll.rewards.code.rows.cases import Call, Calls, Problem, Suite, TextCase, Texts
from roll.rewards.code.rows.columns import problem_of
from roll.rewards.code.rows.packing import unpack
from roll.rewards.contract import sample_of

CODE = "print(1)"


@pytest.mark.parametrize(
    "response",
    [
        CODE,
        f"\n{CODE}\n",
        f"```python\n{CODE}\n```",
        f"So:\n```py\n{CODE}\n```\nIt prints 1.",
        f"First try:\n```python\nprint(2)\n```\nNo:\n~~~python3\n{CODE}\n~~~\n",
        f"```python\n{CODE}\n```\nIt prints\n```\n1\n```\nrun it with\n```bash\npython a.py\n```",
        f"```\nprint(2)\n```\n```\n{CODE}\n```",
        f"1. Do this:\n   ```python\n   {CODE}\n   ```",
        f"```python\n{CODE}",
        f"```Python title=x\n{CODE}\n```",
        f"<answer>\n{CODE}\n</answer>",
        f"<answer>\n```python\n{CODE}\n```\n</answer>",
        f"````python\n{CODE}\n````",
        f"```python\n{CODE}\n```\n```python\n```",
    ],
)
def test_the_program_is_the_last_block_of_its_language(response: str) -> None:
    found = program_of(response, "python")
    assert found is not None
    assert found.strip() == CODE


def test_what_gives_no_program() -> None:
    assert program_of("", "python") is None
    assert program_of(" \n", "python") is None
    assert program_of("```cpp\nint main() {}\n```", "python") is None
    assert program_of("```python\n \n```", "python") is None
    assert program_of("```c++\nint main() {}\n```", "cpp") == "int main() {}"


def test_a_fence_in_a_docstring_ends_nothing_and_indentation_is_kept() -> None:
    code = 'def f():\n    """\n    ```\n    f()\n    ```\n    """\n    return 1'
    assert program_of(f"```python\n{code}\n```", "python") == code
    assert program_of("    return 1\n", "python") == "    return 1"


TEXTS = Texts([TextCase("1 2\n", "3\n"), TextCase("4 5\n", "9\n")])
CALLS = Calls("add", [Call([1, 2], 3), Call([4, 5], 9)])
APPS = {"inputs": ["1 2\n", "4 5\n"], "outputs": ["3\n", "9\n"]}
LISTED = [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5\n", "output": "9\n"}]
CALLED = [{"input": "1\n2", "output": "3"}, {"input": "4\n5", "output": "9"}]


def _packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(value)))).decode()


ROWS: list[tuple[dict[str, Any], Problem]] = [
    ({"input_output": json.dumps(APPS)}, TEXTS),
    ({"input_output": APPS}, TEXTS),
    ({"input_output": {**APPS, "inputs": [["1 2"], ["4 5"]]}}, TEXTS),
    ({"input_output": {"fn_name": "add", "inputs": [[1, 2], [4, 5]], "outputs": [3, 9]}}, CALLS),
    ({"input_output": {"fn_name": "add", "inputs": [[1, 2], [4, 5]], "outputs": [[3], [9]]}}, CALLS),
    ({"public_test_cases": json.dumps(LISTED[:1]), "private_test_cases": _packed(LISTED[1:])}, TEXTS),
    (
        {
            "public_test_cases": json.dumps([{**CALLED[0], "testtype": "functional"}]),
            "private_test_cases": _packed([{**CALLED[1], "testtype": "functional"}]),
            "metadata": json.dumps({"func_name": "add"}),
        },
        CALLS,
    ),
    (
        {
            "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
            "private_tests": {"input": [], "output": []},
            "generated_tests": {"input": ["4 5\n"], "output": ["9\n"]},
        },
        TEXTS,
    ),
    ({"reward_model": {"ground_truth": json.dumps(APPS), "style": "rule"}}, TEXTS),
    ({"tests": json.dumps(APPS)}, TEXTS),
    ({"tests": json.dumps([{**each, "type": "stdin_stdout"} for each in LISTED])}, TEXTS),
    ({"tests": [{**each, "testtype": "functional", "metadata": {"func_name": "add"}} for each in CALLED]}, CALLS),
    ({"tests": [{"fn_name": "add", "type": "function_call", "input": [1, 2], "output": 3},
                {"fn_name": "add", "type": "function_call", "input": [4, 5], "output": 9}]}, CALLS),
    ({"verification_info": json.dumps({"language": "python", "test_cases": LISTED})}, TEXTS),
    ({"test_cases": base64.b64encode(gzip.compress(json.dumps(LISTED).encode())).decode()}, TEXTS),
    ({"test_list": ["assert add(1, 2) == 3"], "test_setup_code": "x = 1"},
     Suite("x = 1\nassert add(1, 2) == 3", "asserts")),
    ({"test": "def check(f):\n    assert f(1) == 2\n", "entry_point": "inc", "prompt": "def inc(x):\n"},
     Suite("def check(f):\n    assert f(1) == 2\n", "asserts", "inc", "def inc(x):\n")),
    ({"test": "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"},
     Suite("from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n", "pytest")),
    ({"test_cases": json.dumps(["assert add(1, 2) == 3"])}, Suite("assert add(1, 2) == 3", "asserts")),
    ({"case_type": "pytest", "test_cases": json.dumps([{"assert_code": "def test(): assert f()"}])},
     Suite("def test(): assert f()", "pytest")),
    ({"case_type": "check_based", "test_cases": [{"check_code": "assert f() == 1"}]},
     Suite("assert f() == 1", "check")),
    ({"check_based": "assert run_solution('1') == '2'"}, Suite("assert run_solution('1') == '2'", "check")),
]  # fmt: skip


def _normal(problem: Problem) -> Problem:
    if isinstance(problem, Texts):
        cases = [TextCase(each.stdin.strip(), each.expected.strip()) for each in problem.cases]
        return Texts(cases, problem.checker)
    if isinstance(problem, Calls):
        return Calls(problem.entry, [Call(list(c.arguments), c.expected) for c in problem.calls])
    return problem


@pytest.mark.parametrize(("row", "problem"), ROWS)
def test_cases_are_found_in_the_columns_of_known_sets(
    row: dict[str, Any], problem: Problem
) -> None:
    assert _normal(problem_of(sample_of("", answer="", extra=row))) == _normal(problem)


def test_cases_may_be_in_a_named_column_or_in_the_answer() -> None:
    named = sample_of("", answer="", extra={"mine": json.dumps(APPS), "tests": "[]"})
    assert _normal(problem_of(named, "mine")) == _normal(TEXTS)
    answered = sample_of("", answer=json.dumps(LISTED), extra={"level": 3})
    assert _normal(problem_of(answered)) == _normal(TEXTS)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({}, "no column with cases is known"),
        ({"tests": "no JSON"}, "neither JSON nor base64"),
        ({"tests": {"a": 1}}, "has the keys a, not `inputs`"),
        ({"tests": [1]}, "a case is int '1', not a mapping"),
        ({"input_output": {"inputs": [], "outputs": []}}, "no case"),
        ({"input_output": {"inputs": ["1"], "outputs": []}}, "1 inputs and 0 outputs"),
        ({"tests": [{"input": "1"}]}, "lacks 'output'"),
        ({"tests": [{"type": "function_call", "input": [1], "output": 1}]}, "name is not given"),
        ({"private_test_cases": base64.b64encode(b"\x78\x9cbroken").decode()}, "decompressed"),
    ],
)
def test_a_row_without_readable_cases_is_named(row: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=r"row contract:0: ") as raised:
        problem_of(sample_of("", answer="", extra=row))
    assert told in str(raised.value)


class _Bad:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/never",)


def test_a_pickle_that_calls_something_is_refused() -> None:
    with pytest.raises(ValueError, match=r"names posix\.system"):
        unpack(base64.b64encode(zlib.compress(pickle.dumps(_Bad()))).decode())


@pytest.mark.parametrize(
    ("kind", "found", "expected", "right"),
    [
        ("exact", "a  b\n", "a  b", True),
        ("exact", "a b\n", "a  b", False),
        ("tokens", "a b\n\n c", "a b c", True),
        ("tokens", "a b", "a b c", False),
        ("tokens", "1.0", "1", False),
        ("numbers", "0.3333333 x", "0.33333333 x", True),
        ("numbers", "0.333 x", "0.33333333 x", False),
        ("numbers", "1e9", "1000000000.0", True),
        ("numbers", "1000000001", "1000000000", False),
        ("numbers", "nan", "1.0", False),
        ("numbers", "inf", "1e400", False),
        ("numbers", "1_0.0", "10.0", False),
        ("numbers", "yes", "YES", False),
        ("numbers", "", "1", False),
        ("numbers", "9" * 5000, "1.0", False),
    ],
)
def test_outputs_are_compared_as_asked(kind: Any, found: str, expected: str, right: bool) -> None:
    assert same_output(found, expected, Comparison(kind=kind)) is right


def test_a_tolerance_is_the_users() -> None:
    loose = Comparison(kind="numbers", absolute=0.1, relative=0.0)
    assert same_output("1.05", "1.0", loose)
    assert not same_output("1.15", "1.0", loose)
    with pytest.raises(ValueError, match="concern `numbers`"):
        Comparison(kind="tokens", absolute=0.1)
