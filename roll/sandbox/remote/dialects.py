"""Three protocols: the request for a program that a host gets, and the reading of its answer.

SandboxFusion and Piston know a limit of time by the clock and one of memory. A few lines before a
Python program set its limit of CPU time, so that a busy host fails nobody. They compile programs in
other languages before each run.
"""

from __future__ import annotations

import base64
import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from roll.sandbox.errors import SandboxError
from roll.sandbox.outcome import Job, Limits, Outcome, Status
from roll.sandbox.remote.messages import job_message, read_outcome
from roll.sandbox.worker_process import as_bytes

COMPILE_S = 60
"""Time of a compiler, where it can be asked for."""
MOST_TOLD = 2**16
"""Characters of a compiler's messages that are kept."""


class Dialect(Protocol):
    """A protocol."""

    @property
    def path(self) -> str:
        """Path to which programs are posted."""

    @property
    def languages(self) -> Mapping[str, str]:
        """Languages of programs, with the host's own names of them."""

    def message(self, job: Job, limits: Limits) -> dict[str, Any]:
        """Return the JSON object that asks for a program."""

    def outcome(self, answer: Any, limits: Limits, wall_s: float) -> Outcome:
        """Return the outcome that an answer tells.

        Args:
            answer: JSON value.
            limits: of the program.
            wall_s: how long the answer took.

        Raises:
            SandboxError: the host could not run it.
            ValueError: the answer is none.
        """


class Roll:
    """`roll sandbox serve`."""

    path = "/run"
    languages: Mapping[str, str] = {"python": "python"}

    def message(self, job: Job, limits: Limits) -> dict[str, Any]:
        """Return all of the job."""
        return job_message(job, limits)

    def outcome(self, answer: Any, limits: Limits, wall_s: float) -> Outcome:
        """Return the outcome as the other host has seen it."""
        return read_outcome(answer)


class SandboxFusion:
    """SandboxFusion's `/run_code`."""

    path = "/run_code"
    languages: Mapping[str, str] = {
        "python": "python",
        "cpp": "cpp",
        "go": "go",
        "java": "java",
        "javascript": "nodejs",
        "rust": "rust",
        "shell": "bash",
    }

    def message(self, job: Job, limits: Limits) -> dict[str, Any]:
        """Return the program with its limit of CPU time, and its files in base64."""
        return {
            "language": self.languages[job.language],
            "code": _program(job, limits),
            "stdin": _text(job.stdin),
            "files": {
                name: base64.b64encode(as_bytes(content)).decode()
                for name, content in job.files.items()
            },
            "compile_timeout": COMPILE_S,
            "run_timeout": limits.wall_s,
            "memory_limit_MB": math.ceil(limits.addresses_mb or limits.memory_mb),
        }

    def outcome(self, answer: Any, limits: Limits, wall_s: float) -> Outcome:
        """Read `status`, and in `run_result` the exit code, which is negative after a signal. There
        is none if `compile_result` tells a failure."""
        status, ran = _member(answer, "status"), _member(answer, "run_result")
        built = answer.get("compile_result")
        if status == "Failed" and ran is None and isinstance(built, dict):
            return _not_built(built, wall_s)
        if status == "SandboxError" or not isinstance(ran, dict):
            told = " ".join(str(answer.get("message")).split())[:300]
            raise SandboxError(f"the host could not run the program: {told or status}")
        code = ran.get("return_code")
        took_s = ran.get("execution_time")
        return _End(
            stdout=str(ran.get("stdout") or ""),
            stderr=str(ran.get("stderr") or ""),
            exit_code=code if isinstance(code, int) and code >= 0 else None,
            signal=-code if isinstance(code, int) and code < 0 else None,
            too_late=_member(ran, "status") == "TimeLimitExceeded",
            wall_s=float(took_s) if isinstance(took_s, int | float) else wall_s,
        ).outcome(limits)


class Piston:
    """Piston's `/api/v2/execute`."""

    path = "/api/v2/execute"
    languages: Mapping[str, str] = {
        "python": "python",
        "cpp": "c++",
        "go": "go",
        "java": "java",
        "javascript": "javascript",
        "rust": "rust",
        "shell": "bash",
    }

    def message(self, job: Job, limits: Limits) -> dict[str, Any]:
        """Return the program as the first file, because that is the one that Piston runs. It adds
        the ending of a language itself."""
        name = "main.py" if job.language == "python" else "Main"
        program = {"name": name, "content": _program(job, limits)}
        others = [
            {
                "name": name,
                "content": base64.b64encode(as_bytes(content)).decode(),
                "encoding": "base64",
            }
            for name, content in job.files.items()
        ]
        return {
            "language": self.languages[job.language],
            "version": "*",
            "files": [program, *others],
            "stdin": _text(job.stdin),
            "run_timeout": math.ceil(limits.wall_s * 1000),
            "run_cpu_time": math.ceil(self._cpu_s(limits) * 1000),
            "run_memory_limit": math.ceil((limits.addresses_mb or limits.memory_mb) * 2**20),
        }

    def outcome(self, answer: Any, limits: Limits, wall_s: float) -> Outcome:
        """Read `run`. Newer versions have a `status`: too late, too much, or an error of Piston. If
        `compile` has failed, `run` is missing, or tells of a program that is not there."""
        built = answer.get("compile") if isinstance(answer, dict) else None
        if isinstance(built, dict) and built.get("code") != 0:
            if built.get("status") == "XX":
                raise SandboxError(f"the host could not compile: {built.get('message')}")
            return _not_built(built, wall_s)
        ran = _member(answer, "run")
        if not isinstance(ran, dict):
            raise ValueError(f"`run` is {type(ran).__name__}")
        told, code, name = ran.get("status"), ran.get("code"), ran.get("signal")
        cpu_ms = ran.get("cpu_time")
        if told == "XX":
            raise SandboxError(f"the host could not run the program: {ran.get('message')}")
        by = getattr(signal, str(name), None) if name else None
        # In older ones the end of the time shows as the signal alone.
        killed_late = told is None and name == "SIGKILL" and wall_s >= limits.wall_s
        return _End(
            stdout=str(ran.get("stdout") or ""),
            stderr=str(ran.get("stderr") or ""),
            exit_code=code if isinstance(code, int) and not name else None,
            signal=int(by) if isinstance(by, signal.Signals) else None,
            too_late=told == "TO" or killed_late,
            too_busy=told == "TO"
            and isinstance(cpu_ms, int | float)
            and limits.cpu_s * 1000 < cpu_ms
            and self._cpu_s(limits) < limits.wall_s,
            too_much=told in ("OL", "EL"),
            wall_s=wall_s,
        ).outcome(limits)

    def _cpu_s(self, limits: Limits) -> float:
        """Return the limit of CPU time for Piston, which has one of 3 s if it is not asked; for
        Python behind the program's own. More than `wall_s` would only be refused more often."""
        return min(math.ceil(limits.cpu_s) + 1, limits.wall_s)


def _not_built(told: Mapping[str, Any], wall_s: float) -> Outcome:
    """Return the outcome of a program that a compiler refuses, from what it has written."""
    text = str(told.get("stderr") or told.get("stdout") or "")[:MOST_TOLD]
    why = "was not compiled"
    return Outcome(Status.NOT_BUILT, None, None, "", text, False, 0.0, wall_s, 0.0, why)


DIALECTS: dict[str, Dialect] = {
    "roll": Roll(),
    "sandbox_fusion": SandboxFusion(),
    "piston": Piston(),
}


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a program, as far as SandboxFusion and Piston tell it."""

    stdout: str
    stderr: str
    exit_code: int | None
    signal: int | None
    too_late: bool
    wall_s: float
    too_busy: bool = False
    """Whether the limit of time was that of CPU time."""
    too_much: bool = False
    """Whether the host's own limit has cut the output."""

    def outcome(self, limits: Limits) -> Outcome:
        """Return it with a status; one that ended in no known way has crashed."""
        most = limits.output_bytes
        cut = self.too_much or max(len(self.stdout), len(self.stderr)) > most
        status, reason = self._judged(limits, cut)
        return Outcome(
            status=status,
            exit_code=self.exit_code,
            signal=self.signal,
            stdout=self.stdout[:most],
            stderr=self.stderr[:most],
            cut=cut,
            cpu_s=0.0,
            wall_s=self.wall_s,
            peak_mb=0.0,
            reason=reason,
        )

    def _judged(self, limits: Limits, cut: bool) -> tuple[Status, str]:
        if self.too_late and not self.too_busy:
            return Status.WALL_TIME, f"took longer than {limits.wall_s:g} s"
        if self.too_busy or self.signal == signal.SIGXCPU:
            return Status.CPU_TIME, f"used more than {limits.cpu_s:g} s of CPU time"
        if self.too_much and max(len(self.stdout), len(self.stderr)) < limits.output_bytes:
            return Status.OUTPUT, (
                f"wrote more than the host keeps, which is less than {limits.output_bytes} bytes: "
                "raise its PISTON_OUTPUT_MAX_SIZE"
            )
        if cut:
            return Status.OUTPUT, f"wrote more than {limits.output_bytes} bytes"
        if self.exit_code is None:
            return Status.CRASHED, f"was ended by signal {self.signal}"
        if self.exit_code == 0:
            return Status.OK, ""
        last = self.stderr.rstrip().rpartition("\n")[2]
        if last.partition(":")[0] == "MemoryError":
            return Status.MEMORY, f"got no more memory of its {limits.memory_mb:g} MB"
        return Status.FAILED, f"ended with exit code {self.exit_code}"


_LIMITED = """
import resource as _r
_r.setrlimit(_r.RLIMIT_CPU, ({cpu_s}, {cpu_s} + 1))
exec(compile({program!r}, "program.py", "exec", dont_inherit=True), globals())
"""


def _program(job: Job, limits: Limits) -> str:
    """Return the text of a program; of a Python program, behind its own limit of CPU time, in whole
    seconds."""
    program = as_bytes(job.program)
    if job.language == "python":
        return _LIMITED.format(cpu_s=math.ceil(limits.cpu_s), program=program)
    return program.decode("utf-8", "replace")


def _text(data: str | bytes) -> str:
    """Return an input as text, because these protocols have no bytes.

    Raises:
        ValueError: it is no UTF-8.
    """
    try:
        return as_bytes(data).decode()
    except UnicodeDecodeError:
        raise ValueError("stdin: this protocol has text only, and it is no UTF-8") from None


def _member(answer: Any, name: str) -> Any:
    if not isinstance(answer, dict) or name not in answer:
        raise ValueError(f"an answer without `{name}`: {answer!r:.200}")
    return answer[name]
