"""A row for each shipped set with the columns of the published data, and two responses.

The values are made up; the names and the forms of the columns are those of the data sets.
"""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from dataclasses import dataclass
from typing import Any

PLUS = """\
import numpy as np

def is_floats(x) -> bool:
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    if isinstance(x, np.ndarray):
        return x.dtype == np.float64 or x.dtype == np.float32
    return False

def assertion(out, exp, atol):
    exact_match = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert exact_match, f"out: {out}, exp: {exp}"

"""
"""Begin of the tests of HumanEval+ and MBPP+."""


def fenced(program: str) -> str:
    return f"Here it is.\n```python\n{program}\n```"


def packed(cases: list[dict[str, str]]) -> str:
    """Pack cases as LiveCodeBench packs its private ones."""
    text = json.dumps(cases)
    return base64.b64encode(zlib.compress(pickle.dumps(text))).decode()


@dataclass(frozen=True)
class Published:
    """A row, a response that is right, and one that is wrong."""

    row: dict[str, Any]
    right: str
    wrong: str
    shown: str
    """Text that the prompt must have."""


ROWS = {
    "gsm8k": Published(
        {
            "question": "A pen costs 3 dollars. How many dollars do 4 pens cost?",
            "answer": "Each costs 3, so it is 4*3 = <<4*3=12>>12.\n#### 12",
        },
        "4 times 3 is \\boxed{12}",
        "\\boxed{13}",
        "How many dollars do 4 pens cost?\n\nReason step by step",
    ),
    "math500": Published(
        {
            "problem": "What is $\\frac{1}{2} + \\frac{1}{4}$?",
            "solution": "It is $\\boxed{\\frac{3}{4}}$.",
            "answer": "\\frac{3}{4}",
            "subject": "Prealgebra",
            "level": 1,
            "unique_id": "test/prealgebra/1.json",
        },
        "\\boxed{0.75}",
        "\\boxed{\\frac{2}{6}}",
        "\\frac{1}{4}",
    ),
    "aime2024": Published(
        {
            "id": 60,
            "problem": "Find the remainder of 1234 by 1000.",
            "solution": "234",
            "answer": "234",
            "url": "https://example.org",
            "year": "2024",
        },
        "\\boxed{234}",
        "\\boxed{34}",
        "Find the remainder",
    ),
    "aime2025": Published(
        {"id": "0", "problem": "Find 7 times 10.", "answer": "70"},
        "so \\boxed{070}",
        "\\boxed{7}",
        "Find 7 times 10.",
    ),
    "gpqa_diamond": Published(
        {
            "Record ID": "rec1",
            "Question": "Which particle has no charge?",
            "Correct Answer": "neutron\n",
            "Incorrect Answer 1": "proton",
            "Incorrect Answer 2": "electron",
            "Incorrect Answer 3": "positron",
            "Explanation": "...",
            "Subdomain": "Physics (general)",
            "High-level domain": "Physics",
        },
        "The answer is neutron: \\boxed{neutron}",
        "\\boxed{proton}",
        ") neutron\n",
    ),
    "mmlu_pro": Published(
        {
            "question_id": 70,
            "question": "How many sides has a square?",
            "options": ["3", "4", "5", "6", "7", "8", "9", "10", "11", "12"],
            "answer": "B",
            "answer_index": 1,
            "cot_content": "",
            "category": "math",
            "src": "made",
        },
        "The answer is (B).",
        "The answer is (C).",
        "(B) 4\n(C) 5\n",
    ),
    "ifeval": Published(
        {
            "key": 1000,
            "prompt": "Name two colours. Use no commas, and answer in all lowercase letters.",
            "instruction_id_list": ["punctuation:no_comma", "change_case:english_lowercase"],
            # The hub's table has every argument in every row.
            "kwargs": [
                {"num_words": None, "relation": None},
                {"num_words": None, "relation": None},
            ],
        },
        "red and green are two of the colours that people know",
        "Red, green.",
        "Use no commas",
    ),
    "humaneval_plus": Published(
        {
            "task_id": "HumanEval/0",
            "prompt": "def half(x):\n    return x / 2\n\n\n"
            'def double(x: int) -> int:\n    """Return twice x."""\n',
            "canonical_solution": "    return 2 * x\n",
            "entry_point": "double",
            "test": PLUS
            + "def check(candidate):\n"
            + "    inputs = [[1], [5], [-3], [2.5]]\n"
            + "    results = [2, 10, -6, 5.0]\n"
            + "    for i, (inp, exp) in enumerate(zip(inputs, results)):\n"
            + "        assertion(candidate(*inp), exp, 0)\n"
            # A function of the prompt, which the response does not repeat.
            + "    assert half(candidate(3)) == 3\n",
        },
        fenced("def double(x: int) -> int:\n    return x + x"),
        fenced("def double(x: int) -> int:\n    return 2 * abs(x)"),
        "Return twice x.",
    ),
    "mbpp_plus": Published(
        {
            "task_id": 2,
            "code": "def largest(a):\n    return max(a)",
            "prompt": "Write a function to find the largest number of a list.",
            "source_file": "made.ipynb",
            "test_imports": [],
            "test_list": ["assert largest([1, 3, 2]) == 3"],
            "test": PLUS
            + "inputs = [[[1, 3, 2]], [[-5, -4]], [[0.5, 0.25]]]\n"
            + "results = [3, -4, 0.5]\n"
            + "for i, (inp, exp) in enumerate(zip(inputs, results)):\n"
            + "    assertion(largest(*inp), exp, 0)\n",
        },
        fenced("def largest(a):\n    return sorted(a)[-1]"),
        # It passes the test of MBPP, not those of MBPP+.
        fenced("def largest(a):\n    return max([0, *a])"),
        "assert largest([1, 3, 2]) == 3",
    ),
    "livecodebench": Published(
        {
            "question_title": "Sum",
            "question_content": "Read two numbers and print their sum.",
            "platform": "atcoder",
            "question_id": "abc000_a",
            "contest_id": "abc000",
            "contest_date": "2025-01-04T00:00:00",
            "starter_code": "",
            "difficulty": "easy",
            "public_test_cases": json.dumps(
                [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
            ),
            "private_test_cases": packed([{"input": "0 9", "output": "9", "testtype": "stdin"}]),
            "metadata": "{}",
        },
        fenced("print(sum(map(int, input().split())))"),
        # It passes the public case, not the private one.
        fenced("print(3)"),
        "reads from standard input",
    ),
}
"""Name of a shipped set -> its row."""
