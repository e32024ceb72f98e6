"""`fix_code`: mend a program until its tests pass; failing tests are shown after each turn."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from typing import Any

from roll.envs.built_in.code.programs import CodeTask, make_task
from roll.envs.tools.built_in.sandboxed import sandbox_of, settings_of
from roll.sandbox import Job, Limits, Status

SHOWN_FAILURES = 3
MAX_SHOWN = 200
"""Number of characters of a value, or of an error, that are shown."""
BLOCK = re.compile(r"(?:^[ \t]*```|```(?=[\w+.-]))[\w+.-]*[ \t]*\n(.*?)```", re.DOTALL | re.M)
"""Block of code, with or without the name of a language. Without one it begins its line: behind
other text, such a mark ends a piece of code."""
_HARNESS = """
import json, sys
job = json.loads(sys.stdin.read())
names, results = {"__name__": "program"}, []
try:
    exec(compile(job["code"], "program.py", "exec"), names)
except BaseException as error:
    results = [["error", f"{type(error).__name__}: {error}"]] * len(job["calls"])
else:
    for call in job["calls"]:
        try:
            results.append(["value", json.loads(json.dumps(names[job["entry"]](*call)))])
        except BaseException as error:
            results.append(["error", f"{type(error).__name__}: {error}"])
sys.stdout.write("\\n" + job["mark"] + json.dumps(results) + "\\n")
"""
"""Program of the sandbox. It knows the inputs of the tests and not their results, which are
compared outside."""


class FixCode:
    """Python function with a mistake. A turn contains the whole mended program in a block of code;
    the last block counts.

    The reward is 1 when all tests pass, 0 before. Of the tests that fail, some are shown; others
    stay hidden, so that the results cannot be copied into the program. Tasks follow from the seed,
    or from a data row with the columns `code` (or `prompt`), `entry` (name of the function) and
    `tests` (list of [arguments, result], or the same as JSON).

    Args:
        tests: number of tests, in tasks of seeds.
        hidden: share of the tests that are never shown.
        level: level of the sandbox, see `roll.sandbox.Sandbox`.
        remote: hosts of the level `remote`: `{urls: [...]}`, and perhaps `protocol`.
        cpu_s: CPU time of one turn's program, in seconds.
        memory_mb: memory of it.
        rules: explain the task in the first observation.
    """

    def __init__(
        self,
        tests: int = 8,
        hidden: float = 0.5,
        level: str = "auto",
        cpu_s: float = 3.0,
        memory_mb: float = 256.0,
        rules: bool = True,
        remote: Mapping[str, Any] | None = None,
    ) -> None:
        """Take the arguments, which the class describes; ValueError for one that is out of its
        range, ConfigError for no level or no hosts."""
        if tests < 1 or not 0 <= hidden <= 1:
            raise ValueError(f"tests = {tests} must be at least 1, hidden = {hidden:g} from 0 to 1")
        self.tests = tests
        self.hidden = hidden
        self.settings = settings_of(level, remote)
        self.limits = Limits(cpu_s=cpu_s, wall_s=10 + 4 * cpu_s, memory_mb=memory_mb, processes=4)
        self.rules = rules
        self._invalid = 0
        self._passed = 0
        self._state = ""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        dice = random.Random(seed)
        given = options or {}
        self.task = _task_of(given) if "tests" in given else make_task(dice, self.tests)
        self._mark = f"{dice.getrandbits(64):016x} "
        self._sandbox = sandbox_of(self.settings)
        rules = (
            "The program has a mistake. Answer with the whole mended program in a block that "
            "begins with ```python and ends with ```.\n"
        )
        task = f"```python\n{self.task.code.rstrip()}\n```\nTests call `{self.task.entry}`."
        return (rules if self.rules else "") + task, self.info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        blocks = BLOCK.findall(action)
        if not blocks:
            self._invalid += 1
            return "There is no block of code.", 0.0, False, False, self.info()
        said, won = self.judge(blocks[-1])
        return said, float(won), won, False, self.info()

    def judge(self, code: str) -> tuple[str, bool]:
        """Run the tests on a program; return what is said about them, and whether all pass."""
        self._state = self._judged(self._results(code))
        return self._state, self._passed == len(self.task.tests)

    def close(self) -> None:
        """Do nothing: all episodes of a process share the sandbox."""

    def _results(self, code: str) -> list[Any] | str:
        """Return what the program gives for each test; or why it gives nothing."""
        calls = [arguments for arguments, _ in self.task.tests]
        job = {"code": code, "entry": self.task.entry, "calls": calls, "mark": self._mark}
        outcome = self._sandbox.run_now(Job(_HARNESS, json.dumps(job), limits=self.limits))
        lines = outcome.stdout.split("\n")
        told = next((line for line in reversed(lines) if line.startswith(self._mark)), None)
        if told is None:
            reached = outcome.status not in (Status.OK, Status.FAILED)
            return f"stopped ({outcome.status.value})" if reached else "ended early"
        try:
            results = json.loads(told.removeprefix(self._mark))
        except (ValueError, RecursionError):
            return "ended early"
        good = isinstance(results, list) and len(results) == len(calls)
        return results if good else "ended early"

    def _judged(self, results: list[Any] | str) -> str:
        """Count the tests that pass, and return what is said about the others."""
        tests = self.task.tests
        if isinstance(results, str):
            self._passed = 0
            return f"0 of {len(tests)} tests pass. The program was {results}."
        right = [_same(result, wanted) for result, (_, wanted) in zip(results, tests, strict=True)]
        self._passed = sum(right)
        lines = [f"{self._passed} of {len(tests)} tests pass."]
        known = len(tests) - int(self.hidden * len(tests))
        for i in [i for i in range(known) if not right[i]][:SHOWN_FAILURES]:
            arguments, wanted = tests[i]
            call = ", ".join(map(repr, arguments))
            lines.append(
                f"{self.task.entry}({call:.{MAX_SHOWN}}) gives {_told(results[i])}, expected "
                f"{wanted!r:.{MAX_SHOWN}}."
            )
        return "\n".join(lines)

    def info(self) -> dict[str, Any]:
        """Return the `info` of `reset` and `step`.

        `tests_passed` is the share that passes; `state` is what was last said about the tests,
        empty at first.
        """
        return {
            "success": self._passed == len(self.task.tests),
            "tests_passed": self._passed / len(self.task.tests),
            "invalid": self._invalid,
            "state": self._state,
        }


def _same(result: Any, wanted: Any) -> bool:
    """Return whether a result of the sandbox is the wanted value, of the same type."""
    texts = [json.dumps(each, sort_keys=True) for each in (result, ["value", wanted])]
    return texts[0] == texts[1]


def _told(result: Any) -> str:
    """Return a result of the sandbox for the policy."""
    if not isinstance(result, list) or len(result) != 2:
        return "nothing"
    kind, value = result
    return f"{value!r:.{MAX_SHOWN}}" if kind == "value" else f"the error {value!s:.{MAX_SHOWN}}"


def _task_of(row: dict[str, Any]) -> CodeTask:
    """Return the task of a data row; ValueError if it is none."""
    code = row.get("code", row.get("prompt"))
    tests = json.loads(row["tests"]) if isinstance(row["tests"], str) else row["tests"]
    pairs = isinstance(tests, list) and tests and all(len(each) == 2 for each in tests)
    if not isinstance(code, str) or not isinstance(row.get("entry"), str) or not pairs:
        raise ValueError(
            "a row needs `code` and `entry`, both text, and `tests`, a list of [arguments, "
            f"result]; found {sorted(row)}"
        )
    return CodeTask(code, row["entry"], tuple((list(each[0]), each[1]) for each in tests))
