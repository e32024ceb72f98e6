"""Tests in Python as cases: asserts (HumanEval, MBPP), pytest files, and programs of the row's own.

The tests and the program run in two sandboxes that know nothing of one another. In that of the
tests, a stand-in takes the place of each name that the program should define. A call of it is
handed over, here, to the program's sandbox: its arguments go there as plain values, and what it
returns comes back as one (`stand_ins`). So the program never sees an expected value, and a test
only ever compares plain values.
"""

from __future__ import annotations

import json
import secrets
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from roll.rewards.code.calls import results
from roll.rewards.code.parsed_tests import Parsed, parsed
from roll.rewards.code.rows.cases import Suite
from roll.rewards.code.running.programs import Program, ended_well
from roll.rewards.code.stand_ins import PROGRAM, PROGRAM_ENDED, PYTEST, TESTS
from roll.rewards.code.verdict import Kind, Verdict, without_result
from roll.sandbox import Limits, Outcome, Sandbox, SandboxError, Session

MOST_CALLS = 10_000
"""Requests that the tests of one program may make."""

_JUDGES = {"asserts": "plain_tests", "pytest": "test_file", "check": "checking_program"}


async def judge_asserts(
    sandbox: Sandbox,
    program: str,
    tests: str,
    entry: str | None = None,
    limits: Limits | None = None,
) -> list[Verdict]:
    """Judge a program by the asserts of its tests; return a verdict for each.

    See `judge_tests`.
    """
    made = Program(program, {})
    return await judge_tests(sandbox, made, Suite(tests, "asserts", entry), limits)


async def judge_tests(
    sandbox: Sandbox,
    program: Program,
    tests: Suite,
    limits: Limits | None = None,
    for_tests: Sandbox | None = None,
) -> list[Verdict]:
    """Judge a program by tests; return a verdict for each case, at least one.

    Cases that are not reached, because the program has ended or the tests cannot go on, have failed
    by that, so that a program gains nothing by its end.

    Args:
        sandbox: runs the program.
        program: defines what the tests call; or it is run by them (`run_solution`).
        tests: the tests.
        limits: of each call of the program; None: those of the sandbox.
        for_tests: runs the tests; None: `sandbox`.

    Raises:
        SandboxError: the sandbox failed.
        ValueError: the tests are no Python, or without asserts.
    """
    limits = limits or sandbox.limits
    text = parsed(tests)
    async with AsyncExitStack() as open_sessions:
        session = await open_sessions.enter_async_context((for_tests or sandbox).session(limits))
        source = TESTS + (PYTEST if tests.style == "pytest" else "")
        prepared = await session.run(source)
        if not prepared.ok:
            raise SandboxError(f"the tests could not be prepared: {prepared.stderr[-500:]}")
        other = _Candidate(sandbox, program, limits, open_sessions)
        return await _dialogue(_Side(session, prepared), other, text, _JUDGES[tests.style])


async def _dialogue(judge: _Side, other: _Candidate, text: Parsed, style: str) -> list[Verdict]:
    """Hand over requests of the tests and answers of the program until the tests end.

    Args:
        judge: session of the tests.
        other: program, which answers.
        text: tests.
        style: function of `stand_ins` that runs them, a value of `_JUDGES`.
    """
    given = (style, text.source, list(text.names), list(text.modules), text.note)
    said = await judge.ask("begin", *given)
    for _ in range(MOST_CALLS):
        if not isinstance(said, dict):
            return [other.ended or without_result(judge.last)]
        if "judged" in said:
            return _verdicts(said, other.ended, text.asserts)
        said = await judge.ask("go_on", json.dumps(await other.answer(said)))
    return [Verdict(Kind.TIMED_OUT, f"the tests made more than {MOST_CALLS} calls")]


class _Side:
    """One of the two sandboxes."""

    def __init__(self, session: Session, prepared: Outcome) -> None:
        """Keep an open session, and the outcome of its first call."""
        self.session, self.last = session, prepared

    async def ask(self, function: str, *arguments: Any) -> Any:
        """Call a function of the session that tells one value, and return this value.

        None: the session has ended, or did not tell one readable value.
        """
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
        except (ValueError, RecursionError):
            return None


@dataclass
class _Candidate:
    """The program's side: its session starts when the tests first ask for one of its names."""

    sandbox: Sandbox
    program: Program
    limits: Limits
    sessions: AsyncExitStack
    ended: Verdict | None = None
    """Why it gives no answers any more."""
    _side: _Side | None = field(default=None)

    async def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the program's answer to a request of the tests, in the form that `stand_ins`
        reads.

        A request `run` runs the whole program anew. All others go to one session, which the first
        of them starts. The answer is `{"ended": True}` if the program gives no answers any more;
        `ended` then says why.

        Raises:
            SandboxError: the session cannot be prepared.
        """
        if self.ended is None and asked.get("do") == "run":
            return await self._run(str(asked["stdin"]))
        if self.ended is None and self._side is None:
            await self._start()
        if self.ended is None and self._side is not None:
            answer = await self._side.ask("tell", json.dumps(asked))
            if isinstance(answer, dict) and _can_be_told(answer):
                return answer
            self.ended = without_result(self._side.last)
        return {"ended": True}

    async def _start(self) -> None:
        """Begin the program's session and define its names there; set `ended` if the program fails
        at that. SandboxError if the session cannot be prepared."""
        session = await self.sessions.enter_async_context(self.sandbox.session(self.limits))
        prepared = await session.run(PROGRAM)
        if not prepared.ok:
            raise SandboxError(f"a program could not be prepared: {prepared.stderr[-500:]}")
        self._side = _Side(session, prepared)
        text = self.program.text
        code = f"exec(compile({text!r}, 'candidate.py', 'exec', dont_inherit=True), names)"
        defined = await session.run(code)
        if not session.open or not defined.ok:
            self.ended = without_result(defined)

    async def _run(self, stdin: str) -> dict[str, Any]:
        """Run the program on a standard input, and answer with its output."""
        outcome = await self.program.run(self.sandbox, stdin, self.limits)
        self.ended = ended_well(outcome)
        return {"value": outcome.stdout} if self.ended is None else {"ended": True}


def _can_be_told(answer: dict[str, Any]) -> bool:
    """Return whether an answer can be written again: a program may have nested it too deep."""
    try:
        json.dumps(answer)
    except RecursionError:
        return False
    return True


def _verdicts(said: dict[str, Any], ended: Verdict | None, asserts: int) -> list[Verdict]:
    """Return the verdicts on all cases.

    Args:
        said: `judged`: True, False or an exception for each case that was reached; `why` the tests
            stopped.
        ended: verdict on a program that has ended before. It is that of the cases which failed by
            that end, whatever the tests made of it.
        asserts: number of asserts in the tests.
    """
    found = [_verdict(each, ended) for each in said["judged"]]
    stopped = ended
    if stopped is None and (said["why"] or not found):
        stopped = Verdict(Kind.RAISED, said["why"] or "no case was reached")
    if stopped is None:
        return found
    missing = max(asserts - len(found), 0 if stopped in found else 1)
    return found + [stopped] * missing


def _verdict(noted: bool | str, ended: Verdict | None) -> Verdict:
    """Return the verdict on a case: `noted` says whether it passed, or is its exception as text."""
    if isinstance(noted, bool):
        return Verdict(Kind.PASSED if noted else Kind.WRONG)
    if ended is not None and noted.startswith(PROGRAM_ENDED):
        return ended
    return Verdict(Kind.RAISED, noted)
