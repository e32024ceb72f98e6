"""`Verdict`: what became of the cases of one program."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from roll.sandbox import Outcome, SandboxError, Status


class Kind(StrEnum):
    """The kinds of result that a case can have."""

    PASSED = "passed"
    NOT_COMPILED = "not_compiled"
    """There is no program, or its text is wrong; nothing has run."""
    WRONG = "wrong"
    RAISED = "raised"
    TIMED_OUT = "timed_out"
    MEMORY = "memory"
    CRASHED = "crashed"
    """Ended before it gave a result, whatever its exit code."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one case."""

    kind: Kind
    why: str = ""

    @property
    def passed(self) -> bool:
        """True only if the right result came back."""
        return self.kind is Kind.PASSED


def without_result(outcome: Outcome) -> Verdict:
    """Return the verdict on a case of which a program told no result.

    Raises:
        SandboxError: nobody waits for the program any more, so there is no verdict.
    """
    if outcome.status is Status.CANCELLED:
        raise SandboxError(f"a program was not judged: {outcome.reason}")
    kinds = {
        Status.CPU_TIME: Kind.TIMED_OUT,
        Status.WALL_TIME: Kind.TIMED_OUT,
        Status.MEMORY: Kind.MEMORY,
        Status.FAILED: Kind.RAISED,
        Status.NOT_BUILT: Kind.NOT_COMPILED,
    }
    last = outcome.stderr.rstrip().rpartition("\n")[2]
    return Verdict(kinds.get(outcome.status, Kind.CRASHED), outcome.reason or last or "no result")
