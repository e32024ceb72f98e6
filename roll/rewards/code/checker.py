"""Checkers: programs of a row that say whether an output is right, where several are.

A checker is trusted, but reads what a program wrote, so it runs in the sandbox, too; without the
program.
"""

from __future__ import annotations

import json
import re
import secrets

from roll.rewards.code.calls import results
from roll.rewards.code.rows.cases import Checker, TextCase
from roll.rewards.code.verdict import Kind, Verdict
from roll.sandbox import Limits, Sandbox, SandboxError

_CALL = """
import json, sys
task = json.loads(sys.stdin.buffer.read())
names = {"__name__": "checker", "__builtins__": __builtins__}
exec(compile(task["checker"], "checker.py", "exec", dont_inherit=True), names)
found = float(names["check"](task["input"], task["output"], task["expected"]))
sys.stdout.write(f"\\n{task['nonce']}0:{json.dumps(found)}{task['nonce']}\\n")
"""
_DEFINES = re.compile(r"^def check\(", re.MULTILINE)
_SCRIPT = "import sys\nsys.argv[1:] = {names!r}\n"
_FILES = {"input": "input.txt", "output": "output.txt", "expected": "answer.txt"}


async def judge_by_checker(
    sandbox: Sandbox, checker: Checker, case: TextCase, output: str, limits: Limits
) -> Verdict:
    """Return the verdict of a row's checker on an output.

    An output on which the checker fails is wrong, unless the checker fails on the right one, too.

    A checker that defines `check(input, output, expected)` returns True, or a number that is 1 or
    more, for a right output. Any other is a script with the names of three files as arguments. It
    ends with exit code 0 for a right output, and if it prints a number at last, this is 1 or more.

    Raises:
        SandboxError: the checker failed; this is never the program's doing.
    """
    try:
        return await _judged(sandbox, checker, case, output, limits)
    except _CheckerFailedError:
        pass
    try:
        await _judged(sandbox, checker, case, case.expected, limits)
    except _CheckerFailedError as error:
        raise SandboxError(f"the row's checker failed on the right output: {error}") from None
    return Verdict(Kind.WRONG, "the checker fails on the output")


class _CheckerFailedError(Exception):
    """Error: a checker gave no verdict on an output."""


async def _judged(
    sandbox: Sandbox, checker: Checker, case: TextCase, output: str, limits: Limits
) -> Verdict:
    if _DEFINES.search(checker.text):
        return await _call(sandbox, checker, case, output, limits)
    contents = {"input": case.stdin, "output": output, "expected": case.expected}
    files = {_FILES[name]: contents[name] for name in _FILES}
    script = _SCRIPT.format(names=[_FILES[name] for name in checker.order])
    outcome = await sandbox.run(script + checker.text, files=files, limits=limits)
    told = outcome.stdout.split()
    score = _number(told[-1]) if told else None
    if outcome.exit_code is None or "Traceback (most recent" in outcome.stderr:
        raise _CheckerFailedError(f"{outcome.reason} {outcome.stderr[-500:]}")
    return _verdict(outcome.ok and (score is None or score >= 1))


async def _call(
    sandbox: Sandbox, checker: Checker, case: TextCase, output: str, limits: Limits
) -> Verdict:
    """Return the verdict of a checker that defines the function `check`; SandboxError if it gives
    no result."""
    nonce = secrets.token_hex(16)
    task = {
        "nonce": nonce,
        "checker": checker.text,
        "input": case.stdin,
        "output": output,
        "expected": case.expected,
    }
    outcome = await sandbox.run(_CALL, json.dumps(task), limits=limits)
    told = results(outcome.stdout, nonce).get(0, [])
    if len(told) != 1:
        raise _CheckerFailedError(f"{outcome.reason} {outcome.stderr[-500:]}")
    return _verdict(json.loads(told[0]) >= 1)


def _verdict(right: bool) -> Verdict:
    return Verdict(Kind.PASSED) if right else Verdict(Kind.WRONG, "the checker refuses the output")


def _number(text: str) -> float | None:
    """Return the number that a text is; None if it is none."""
    try:
        return float(text)
    except ValueError:
        return None
