"""Tests with `assert` as cases, as HumanEval and MBPP have them.

The tests and the program run in two sandboxes that know nothing of one another. In that of the
tests, a stand-in takes the place of each name that the program should define. A call of it is
handed over, here, to the program's sandbox: its arguments go there as plain values, and what it
returns comes back as one. So the program never sees an expected value, and an assert only ever
compares plain values.
"""

from __future__ import annotations

import ast
import builtins
import json
import secrets
from typing import Any

from roll.rewards.code.calls import results
from roll.rewards.code.values import DECODE, ENCODE
from roll.rewards.code.verdict import Kind, Verdict, without_result
from roll.sandbox import Limits, Outcome, Sandbox, Session

MOST_CALLS = 2000
"""Calls that the tests of one program may make."""

_PROGRAM = (
    ENCODE
    + DECODE
    + """
import builtins, json, sys

def answer(asked):
    try:
        path, arguments, named = asked["path"], decode(asked["arguments"]), decode(asked["named"])
        target = held[path[0]] if isinstance(path[0], int) else names[path[0]]
        for name in path[1:]:
            target = getattr(target, name)
        value = target(*arguments, **named)
        if isinstance(target, type) and target.__module__ != "builtins":
            held.append(value)
            return {"object": len(held) - 1}
        return {"value": encode(value), "after": [encode(arguments), encode(named)]}
    except Exception as error:
        kind = type(error).__name__
        known = isinstance(getattr(builtins, kind, None), type)
        return {"raised": [kind if known else "Exception", str(error)[:300]]}

def tell(text, mark, write=sys.stdout.write, dump=json.dumps):
    write(f"\\n{mark}0:{dump(answer(json.loads(text)))}{mark}\\n")

names, held = {"__name__": "candidate", "__builtins__": builtins}, []
"""
)

_TESTS = (
    ENCODE
    + DECODE
    + """
import builtins, json, queue, sys, threading
asked, answered, judged = queue.Queue(), queue.Queue(), []

class ProgramEnded(Exception): pass

class StandIn:
    def __init__(self, path): self.path = path
    def __getattr__(self, name): return StandIn([*self.path, name])
    def __call__(self, *arguments, **named):
        before = [encode(list(arguments)), encode(named)]
        asked.put({"path": self.path, "arguments": before[0], "named": before[1]})
        answer = answered.get()
        if "ended" in answer: raise ProgramEnded("no answer")
        if "object" in answer: return StandIn([answer["object"]])
        if "raised" in answer:
            kind, text = answer["raised"]
            kind = getattr(builtins, kind, Exception)
            usual = isinstance(kind, type) and issubclass(kind, Exception)
            # These would end a loop of the tests, and the asserts behind it were not reached.
            ends_loops = kind in (StopIteration, StopAsyncIteration)
            raise (kind if usual and not ends_loops else Exception)(text)
        if answer["after"] != before:
            now, now_named = map(decode, answer["after"])
            for mine, changed in [*zip(arguments, now), *((named[k], now_named[k]) for k in named)]:
                if type(mine) is list: mine[:] = changed
                elif type(mine) in (dict, set): mine.clear(); mine.update(changed)
        return decode(answer["value"])

def run(tests, names, note):
    found = {"__name__": "tests", "__builtins__": builtins, note: judged}
    found.update({name: StandIn([name]) for name in names})
    try:
        exec(compile(tests, "tests.py", "exec", dont_inherit=True), found)
        why = ""
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"[:300]
    asked.put({"judged": judged, "why": why})

def begin(tests, names, note, mark):
    threading.Thread(target=run, args=(tests, names, note), daemon=True).start()
    wait(mark)

def go_on(text, mark):
    answered.put(json.loads(text))
    wait(mark)

def wait(mark):
    sys.stdout.write(f"\\n{mark}0:{json.dumps(asked.get())}{mark}\\n")
"""
)


async def judge_asserts(
    sandbox: Sandbox,
    program: str,
    tests: str,
    entry: str | None = None,
    limits: Limits | None = None,
) -> list[Verdict]:
    """Judge a program by the asserts of its tests; return a verdict for each that was reached.

    If the tests cannot go on, a last verdict says why. There is always at least one.

    Args:
        sandbox: runs the program, and the tests.
        program: text that defines what the tests call.
        tests: Python with asserts, anywhere in it.
        entry: name of the function that the tests get as the argument of `check`, if they define a
            function of this name and do not call it.
        limits: of each call of the program; None: those of the sandbox.

    Raises:
        SandboxError: the sandbox failed.
        ValueError: the tests are no Python, or without asserts.
    """
    note = f"judged_{secrets.token_hex(8)}"
    tree = _parse(tests, entry)
    names = sorted(_free_names(tree))
    text = ast.unparse(ast.fix_missing_locations(_Noted(note).visit(tree)))
    limits = limits or sandbox.limits
    async with sandbox.session(limits) as for_tests, sandbox.session(limits) as for_program:
        judge = _Side(for_tests, await for_tests.run(_TESTS))
        candidate = _Side(for_program, await for_program.run(_PROGRAM))
        code = f"exec(compile({program!r}, 'candidate.py', 'exec', dont_inherit=True), names)"
        defined = await for_program.run(code)
        if not for_program.open or not defined.ok:
            return [without_result(defined)]
        said, ended = await judge.ask("begin", text, names, note), None
        for _ in range(MOST_CALLS):
            if not isinstance(said, dict):
                return [without_result(judge.last)]
            if "judged" in said:
                return _verdicts(said, ended)
            answer = None if ended else await candidate.ask("tell", json.dumps(said))
            if not isinstance(answer, dict):
                ended = ended or without_result(candidate.last)
                answer = {"ended": True}
            said = await judge.ask("go_on", json.dumps(answer))
    return [Verdict(Kind.TIMED_OUT, f"the tests made more than {MOST_CALLS} calls")]


class _Side:
    """One of the two sandboxes."""

    def __init__(self, session: Session, prepared: Outcome) -> None:
        """Keep an open session, and the outcome of its first call."""
        self.session, self.last = session, prepared

    async def ask(self, function: str, *arguments: Any) -> Any:
        """Call a function of the session that tells one value; return it, or None."""
        if not self.session.open:
            return None
        mark = secrets.token_hex(16)
        call = f"{function}({', '.join(map(repr, arguments))}, {mark!r})"
        self.last = await self.session.run(call)
        told = results(self.last.stdout, mark).get(0, [])
        if len(told) != 1:
            return None
        try:
            return json.loads(told[0])
        except ValueError:
            return None


def _verdicts(said: dict[str, Any], ended: Verdict | None) -> list[Verdict]:
    """Return what the tests have noted.

    Args:
        said: `judged`: True, False or an exception for each assert; `why` the tests stopped.
        ended: verdict on a program that has ended before.
    """
    found = [*said["judged"], *[each for each in (said["why"],) if each]]
    return [_verdict(each, ended) for each in found or ["no assert was reached"]]


def _verdict(noted: bool | str, ended: Verdict | None) -> Verdict:
    if isinstance(noted, bool):
        return Verdict(Kind.PASSED if noted else Kind.WRONG)
    if ended is not None and noted.startswith("ProgramEnded"):
        return ended
    return Verdict(Kind.RAISED, noted)


def _parse(tests: str, entry: str | None) -> ast.Module:
    """Return the tests, with a call of `check` if they define it and do not call it.

    Raises:
        ValueError: they are no Python, or without asserts.
    """
    try:
        tree = ast.parse(tests)
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"tests: no Python: {error}") from error
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise ValueError("tests: expected at least one assert, found none")
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    if entry is not None and "check" in defined and "check" not in called:
        tree.body.append(ast.parse(f"check({entry})").body[0])
    return tree


def _free_names(tree: ast.Module) -> set[str]:
    """Return the names that the tests use and neither they nor Python define."""
    loaded: set[str] = set()
    bound = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(each.asname or each.name).partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return loaded - bound


class _Noted(ast.NodeTransformer):
    """Makes of each assert statements that note whether its condition holds, and go on."""

    def __init__(self, name: str) -> None:
        """Keep the name of the list that takes the notes."""
        self._name = name

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """Return a `try` that notes True, False, or the exception as text."""
        name, error = self._name, f"{self._name}_error"
        made = ast.parse(
            f"try: {name}.append(bool(condition))\n"
            f"except Exception as {error}:\n"
            f"    {name}.append(type({error}).__name__ + ': ' + str({error})[:300])"
        ).body[0]
        for each in ast.walk(made):
            if isinstance(each, ast.Call) and ast.unparse(each) == "bool(condition)":
                each.args = [node.test]
                break
        return ast.copy_location(made, node)
