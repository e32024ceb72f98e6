"""Mending programs: every mistake fails tests, the right program passes, and cheating does not."""

from __future__ import annotations

import inspect
import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from roll.envs.built_in.code.fix_code import BLOCK, FixCode
from roll.envs.built_in.code.programs import PROGRAMS, Program, make_task
from roll.envs.contract import check_env

ROW = {
    "code": "def add(a, b):\n    return a - b\n",
    "entry": "add",
    "tests": json.dumps([[[1, 2], 3], [[0, 0], 0], [[5, -5], 0], [[2, 2], 4]]),
}


def played(*programs: str, **kwargs: Any) -> list[tuple[str, float, bool, bool, dict[str, Any]]]:
    """The answers to programs for the task of the row."""

    env = FixCode(**kwargs)
    env.reset(seed=1, options=ROW)
    turns = [env.step(f"So:\n```python\n{each}\n```") for each in programs]
    env.close()
    return turns


RIGHT = {program.right.__name__: inspect.getsource(program.right) for program in PROGRAMS}


def mender() -> Callable[[str], str]:
    """A policy that knows the right programs."""
    return lambda said: f"```python\n{RIGHT[re.findall(r'def (.+?)[(]', said)[0]]}\n```"


def test_it_keeps_the_contract_and_right_programs_pass() -> None:
    check_env(
        FixCode,
        solver=mender,
        seeds=range(4),
        max_turns=3,
        actions=["```python\nimport os; os._exit(0)\n```", "```\nprint(1)\n```"],
        reward_range=(0, 1),
    )


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.right.__name__)
def test_every_mistake_is_found_by_the_tests(program: Program) -> None:
    """The mistaken texts are ours, so they may run here."""
    source = inspect.getsource(program.right)
    for before, after in program.mistakes:
        assert before in source
        names: dict[str, Any] = {"Any": Any}
        exec(source.replace(before, after, 1), names)
        wrong, misses = names[program.right.__name__], 0
        for seed in range(50):
            dice = random.Random(seed)
            inputs = [program.inputs(dice) for _ in range(8)]
            misses += not any(outcome(wrong, each) != program.right(*each) for each in inputs)
        assert misses <= 5, (before, after, misses)


def outcome(function: Callable[..., Any], arguments: list[Any]) -> Any:
    try:
        return function(*arguments)
    except IndexError as error:
        return repr(error)


def test_a_task_is_one_of_the_seed() -> None:
    made = [make_task(random.Random(seed), 5) for seed in range(40)]
    assert made == [make_task(random.Random(seed), 5) for seed in range(40)]
    assert {each.entry for each in made} == set(RIGHT)
    assert all(each.code != RIGHT[each.entry] for each in made)


def test_failing_tests_are_shown_until_all_pass() -> None:
    turns = played("def add(a, b):\n    return a * b", "def add(a, b):\n    return a + b", hidden=0)
    assert turns[0][0] == (
        "2 of 4 tests pass.\nadd(1, 2) gives 2, expected 3.\nadd(5, -5) gives -25, expected 0."
    )
    assert turns[0][1:4] == (0.0, False, False)
    assert turns[0][4]["tests_passed"] == 0.5
    assert turns[1][0] == "4 of 4 tests pass."
    assert turns[1][1:4] == (1.0, True, False)
    assert turns[1][4]["success"] is True


def test_hidden_tests_are_counted_and_not_shown() -> None:
    ((said, *_),) = played("def add(a, b):\n    return None", hidden=0.75)
    assert said == "0 of 4 tests pass.\nadd(1, 2) gives None, expected 3."


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("def add(a, b): return a +", "the error SyntaxError"),
        ("def sub(a, b): return 1", "the error KeyError: 'add'"),
        ("def add(a, b): return 1 / 0", "the error ZeroDivisionError: division by zero"),
        ("def add(a, b): return {1, 2}", "the error TypeError: Object of type set"),
        ("def add(a, b): return float(a + b)", "gives 3.0, expected 3"),
        ("import os; os._exit(0)", "The program was ended early."),
        ("while True: pass", "The program was stopped (cpu_time)."),
        ("x = ' ' * 10**10", "0 of 4 tests pass."),
        ("import sys; sys.exit(0)", "the error SystemExit: 0"),
        ("import json; json.dumps = lambda *_: '[1]'\ndef add(a, b): return 3", "ended early"),
        ("import json; json.dumps = lambda *_: '[1, 2, 3, [4]]'", "gives nothing, expected 3"),
        ("class Any:\n  __eq__ = lambda *_: True\ndef add(a, b): return Any()", "not JSON"),
    ],
)
def test_wrong_programs_get_no_reward_and_are_told_why(program: str, said: str) -> None:
    ((text, reward, over, cut, info),) = played(program, hidden=0, cpu_s=0.5)
    assert said in text
    assert (reward, over, cut, info["success"]) == (0.0, False, False, False)


@pytest.mark.parametrize(
    ("turn", "block"),
    [
        ("```python3\nA\n```\nWhy:\n```python\nB\n```", "B\n"),
        ("```c++\nA\n```", "A\n"),
        ("Say ```x``` so:\n  ```\nA```", "A"),
        ("The program: ```python\nA\n```", "A\n"),
        ("Like ```x```\nthis: ```sh\nA\n```", "A\n"),
    ],
)
def test_the_last_block_counts_whatever_its_language_is_called(turn: str, block: str) -> None:
    assert BLOCK.findall(turn)[-1] == block


def test_a_mapping_is_right_in_any_order() -> None:
    row = {
        "code": "def count(a):\n    return {}\n",
        "entry": "count",
        "tests": [[["ba"], {"a": 1, "b": 1}]],
    }
    env = FixCode()
    env.reset(seed=1, options=row)
    program = "def count(a):\n    return {'b': a.count('b'), 'a': a.count('a')}\n"
    _, reward, ended, *_ = env.step(f"```python\n{program}```")
    env.close()
    assert (reward, ended) == (1, True)


def test_a_turn_without_code_is_counted() -> None:
    env = FixCode()
    first, _ = env.reset(seed=0)
    assert "```python\ndef " in first
    said, _, over, _, info = env.step("return a + b")
    assert (said, over, info["invalid"]) == ("There is no block of code.", False, 1)


@pytest.mark.parametrize("change", [{"entry": None}, {"tests": []}, {"code": 3}, {"tests": [[1]]}])
def test_a_row_that_is_no_task_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a row needs `code` and `entry`"):
        FixCode().reset(options=ROW | change)
