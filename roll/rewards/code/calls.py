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
from dataclasses import replace
from typing import Any

from roll.rewards.code.rows.cases import Call
from roll.rewards.code.values import ENCODE, decode, encode, same
from roll.rewards.code.verdict import Kind, Verdict, without_result
from roll.sandbox import Limits, Sandbox

_PRELUDE = """
import collections, functools, heapq, itertools, math, operator, random, re, statistics, string, sys
from bisect import *
from collections import *
from copy import *
from datetime import *
from functools import *
from heapq import *
from itertools import *
from math import *
from operator import *
from random import *
from re import *
from statistics import *
from string import *
from builtins import *
from typing import *
"""
"""What the sites that such problems come from import for every program."""

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
exec(task["prelude"], names)
exec(compile(task["program"], "candidate.py", "exec", dont_inherit=True), names)
for place, arguments in enumerate(task["calls"]):
    try:
        result = {"value": encode(resolve(names, task["entry"].split("."))(*arguments))}
    except Exception as error:
        result = {"raised": f"{type(error).__name__}: {error}"[:300]}
    tell(place, result)
"""
)


async def judge_calls(
    sandbox: Sandbox,
    program: str,
    entry: str,
    calls: Sequence[Call],
    limits: Limits | None = None,
    *,
    stop: bool = False,
) -> list[Verdict]:
    """Call a function of a program with each case's arguments; judge what it returns.

    One process makes the calls one after another. A case that fails there, or that it does not
    reach, has its verdict from a process of its own: what earlier calls left behind, or used up, is
    not to its disadvantage.

    Args:
        sandbox: runs the program.
        program: text that defines the function.
        entry: its name; a method of a class `Solution` may be named with or without the class.
        calls: the cases.
        limits: of each call; None: those of the sandbox.
        stop: leave out what comes after the first case that fails.

    Raises:
        SandboxError: the sandbox failed.
    """
    limits = limits or sandbox.limits
    verdicts: list[Verdict] = []
    told: list[Verdict] = []
    while len(verdicts) < len(calls):
        place = len(verdicts)
        if not told:
            told = await _told(sandbox, program, entry, calls[place:], limits)
            fresh = True
        verdict = told.pop(0)
        if not (verdict.passed or fresh):
            verdict = (await _told(sandbox, program, entry, calls[place : place + 1], limits))[0]
        fresh = False
        verdicts.append(verdict)
        if stop and not verdict.passed:
            break
    return verdicts


async def _told(
    sandbox: Sandbox, program: str, entry: str, calls: Sequence[Call], limits: Limits
) -> list[Verdict]:
    """Return the verdicts on the first calls, which one process has made; at least one."""
    nonce = secrets.token_hex(16)
    task = {
        "nonce": nonce,
        "prelude": _PRELUDE,
        "program": program,
        "entry": entry,
        "calls": [list(call.arguments) for call in calls],
    }
    size = sum(len(encode(call.expected)) for call in calls)
    limits = replace(limits, output_bytes=limits.output_bytes + 2 * size)
    outcome = await sandbox.run(_HARNESS, json.dumps(task), limits=limits)
    told = results(outcome.stdout, nonce)
    verdicts = []
    for place, call in enumerate(calls):
        if place not in told:
            break
        verdicts.append(_judge(call, told[place]))
    return verdicts or [without_result(outcome)]


def results(output: str, nonce: str) -> dict[int, list[str]]:
    """Return the results between nonces, by place; a program may have forged more of them."""
    found: dict[int, list[str]] = {}
    pattern = rf"^{nonce}(\d{{1,9}}):(.*){nonce}$"
    for place, text in re.findall(pattern, output, re.MULTILINE):
        found.setdefault(int(place), []).append(text)
    return found


def _judge(call: Call, told: list[str]) -> Verdict:
    """Return the verdict on a call from what was told of it; more than one text was forged by the
    program."""
    if len(told) > 1:
        return Verdict(Kind.WRONG, f"told {len(told)} results")
    try:
        result = json.loads(told[0])
        if "raised" in result:
            return Verdict(Kind.RAISED, str(result["raised"]))
        found = decode(json.dumps(result["value"]))
        if same(call.expected, _as_json(found)):
            return Verdict(Kind.PASSED)
        return Verdict(Kind.WRONG, f"returned {encode(found)[:200]}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return Verdict(Kind.WRONG, f"no readable result: {error}")


def _as_json(value: Any) -> Any:
    """Return a value with what JSON has in place of tuples and of special dicts."""
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    if isinstance(value, dict):
        return {key: _as_json(each) for key, each in value.items()}
    return value
