"""Verdicts on one program, whatever the form of its cases."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from roll.rewards.code.asserts import judge_tests
from roll.rewards.code.calls import judge_calls
from roll.rewards.code.checker import judge_by_checker
from roll.rewards.code.outputs import Comparison, same_output
from roll.rewards.code.rows.cases import Calls, Checker, Problem, TextCase, Texts
from roll.rewards.code.running.programs import Program, build, ended_well, in_order
from roll.rewards.code.running.sandboxes import OpenSandbox
from roll.rewards.code.verdict import Kind, Verdict
from roll.sandbox import Limits


@dataclass(frozen=True, slots=True)
class Judged:
    """Verdicts on a program."""

    verdicts: Sequence[Verdict]
    """Of its cases, in their order; where the first failure ends the judging, up to that one."""
    number: int
    """Number of all its cases, at least 1."""


@dataclass(frozen=True, slots=True)
class Judging:
    """Judge of programs: sandbox, language, limits and comparison."""

    opened: OpenSandbox
    language: str
    limits: Limits
    """Of one case."""
    compare: Comparison
    stop: bool
    """Leave out what comes after the first case that fails."""
    for_pytest: Callable[[], Awaitable[OpenSandbox]]
    """Returns a sandbox with pytest, for pytest files."""

    async def judge(self, source: str, problem: Problem) -> Judged:
        """Judge a program; the only verdict on a text that is none is `NOT_COMPILED`.

        Raises:
            SandboxError: the sandbox failed.
            ValueError: the tests of the row are no Python.
        """
        sandbox = self.opened.sandbox
        program = await build(sandbox, self.language, source)
        if isinstance(program, Verdict):
            return Judged([program], 1)
        if isinstance(problem, Texts):
            judges = [
                functools.partial(self._text, program, case, problem.checker)
                for case in problem.cases
            ]
            found = await in_order(judges, self.opened.width, self.stop)
            return Judged(found, len(problem.cases))
        if isinstance(problem, Calls):
            found = await judge_calls(
                sandbox, source, problem.entry, problem.calls, self.limits, stop=self.stop
            )
            return Judged(found, max(len(problem.calls), len(found)))
        for_tests = await self.for_pytest() if problem.style == "pytest" else self.opened
        async with self.opened.turn():
            found = await judge_tests(sandbox, program, problem, self.limits, for_tests.sandbox)
        return Judged(until_failure(found) if self.stop else found, len(found))

    async def _text(self, program: Program, case: TextCase, checker: Checker | None) -> Verdict:
        """Run a program on a standard input and judge what it writes.

        Raises:
            SandboxError: the sandbox or the row's checker failed.
            ValueError: a checker should compare, and the row has none.
        """
        sandbox = self.opened.sandbox
        room = self.limits.output_bytes + 2 * len(case.expected)
        limits = replace(self.limits, output_bytes=room)
        outcome = await program.run(sandbox, case.stdin, limits)
        failed = ended_well(outcome)
        if failed is not None:
            return failed
        if self.compare.kind == "checker":
            if checker is None:
                raise ValueError("compare: checker, but it has no column `checker` with a program")
            return await judge_by_checker(sandbox, checker, case, outcome.stdout, limits)
        if same_output(outcome.stdout, case.expected, self.compare):
            return Verdict(Kind.PASSED)
        return Verdict(Kind.WRONG, f"wrote {outcome.stdout[:200]!r}")


def until_failure(verdicts: Sequence[Verdict]) -> Sequence[Verdict]:
    """Return the verdicts up to the first that is no pass."""
    first = next((n for n, each in enumerate(verdicts) if not each.passed), len(verdicts))
    return verdicts[: first + 1]
