"""Function calls as cases: a program's function, arguments, and the value that it should return.

The program and the arguments enter the sandbox, the expected values do not. What comes back is
text between nonces, and is compared here. A program that finds the nonce can say what it returns,
but it can do that by returning it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roll.rewards.code.values import ENCODE, decode, encode, same
from roll.rewards.code.verdict import Kind, Verdict, without_result
from roll.sandbox import Limits, Sandbox

_HARNESS = (
    ENCODE
    + """
import json, sys
task = json.loads(sys.stdin.buffer.read())

def tell(place, result, write=sys.stdout.write, dump=json.dumps, mark=task["nonce"]):
    write(f"\\n{mark}{place}:{dump(result)}{mark}\\n")
    sys.stdout.flush()

def resolve(names, path):
    if path[0] in names:
        found, rest = names[path[0]], path[1:]
    else:
        found, rest = names["Solution"], path
    for name in rest:
        found = getattr(found() if isinstance(found, type) else found, name)
    return found

names = {"__name__": "candidate", "__builtins__": __builtins__}
exec(compile(task["program"], "candidate.py", "exec", dont_inherit=True), names)
for place, arguments in enumerate(task["calls"]):
    try:
        result = {"value": encode(resolve(names, task["entry"].split("."))(*arguments))}
    except Exception as error:
        result = {"raised": f"{type(error).__name__}: {error}"[:300]}
    tell(place, result)
"""
)


@dataclass(frozen=True, slots=True)
class Call:
    """One case."""

    arguments: Sequence[Any]
    """Values that JSON has."""
    expected: Any
    """Plain value (`values.encode`). Where it is a list, the program may return a tuple."""


async def judge_calls(
    sandbox: Sandbox,
    program: str,
    entry: str,
    calls: Sequence[Call],
    limits: Limits | None = None,
) -> list[Verdict]:
    """Call a function of a program with each case's arguments, in one process; judge what returns.

    Args:
        sandbox: runs the program.
        program: text that defines the function.
        entry: its name; a method of a class `Solution` may be named with or without the class.
        calls: the cases.
        limits: of all calls together; None: those of the sandbox.

    Raises:
        SandboxError: the sandbox failed.
    """
    nonce = secrets.token_hex(16)
    task = {
        "nonce": nonce,
        "program": program,
        "entry": entry,
        "calls": [list(call.arguments) for call in calls],
    }
    outcome = await sandbox.run(_HARNESS, json.dumps(task), limits=limits)
    told = results(outcome.stdout, nonce)
    return [
        _judge(call, told[place]) if place in told else without_result(outcome)
        for place, call in enumerate(calls)
    ]


def results(output: str, nonce: str) -> dict[int, list[str]]:
    """Return the results between nonces, by place; a program may have forged more of them."""
    found: dict[int, list[str]] = {}
    pattern = rf"^{nonce}(\d{{1,9}}):(.*){nonce}$"
    for place, text in re.findall(pattern, output, re.MULTILINE):
        found.setdefault(int(place), []).append(text)
    return found


def _judge(call: Call, told: list[str]) -> Verdict:
    if len(told) > 1:
        return Verdict(Kind.WRONG, f"told {len(told)} results")
    try:
        result = json.loads(told[0])
        if "raised" in result:
            return Verdict(Kind.RAISED, str(result["raised"]))
        found = decode(json.dumps(result["value"]))
    except (ValueError, TypeError, KeyError) as error:
        return Verdict(Kind.WRONG, f"no readable result: {error}")
    if same(call.expected, _as_list(found) if isinstance(call.expected, list) else found):
        return Verdict(Kind.PASSED)
    shown = encode(found)
    return Verdict(Kind.WRONG, f"returned {shown[:200]}")


def _as_list(value: Any) -> Any:
    """Return tuples as lists, which JSON has in their place."""
    if isinstance(value, list | tuple):
        return [_as_list(each) for each in value]
    return value
