"""The `code` reward: does the program in a response pass its cases?"""

from __future__ import annotations

import ast
import re
from collections import Counter
from typing import Any, Literal

from roll.core.errors import ConfigError, DataError
from roll.core.types import Sample
from roll.rewards.api import Reward
from roll.rewards.code.judging import Judged, Judging
from roll.rewards.code.outputs import Comparison, Kind
from roll.rewards.code.rows.answer import program_of
from roll.rewards.code.rows.cases import Problem, Suite, Texts
from roll.rewards.code.rows.columns import problem_of
from roll.rewards.code.running.languages import places_of
from roll.rewards.code.running.sandboxes import (
    LimitSettings,
    SandboxSettings,
    open_pytest_sandbox,
    open_sandbox,
)
from roll.rewards.code.verdict import Kind as Result
from roll.rewards.code.verdict import Verdict
from roll.rewards.thinking import final_text

MOST_CHARS = 1_000_000
"""Largest length of a program, in characters; a longer one is none."""

Score = Literal["all", "share", "first_failure"]
LanguageName = Literal["python", "cpp", "javascript", "go", "java", "rust", "shell"]


async def code_reward(
    sample: Sample,
    *,
    cases: str | None = None,
    score: Score = "all",
    stop: bool = False,
    compare: Kind | Comparison = "tokens",
    language: LanguageName = "python",
    limits: LimitSettings = LimitSettings(),  # noqa: B008  # frozen
    sandbox: SandboxSettings = SandboxSettings(),  # noqa: B008  # frozen
) -> Reward:
    """Return 1 if the program in a response passes all cases of its row, or the share, else 0.

    The program is the last fenced block of the text after the thoughts (`rows.answer`). The columns
    of the row say in which form its cases are (`rows.columns`): standard input and output, calls of
    a function, asserts, a pytest file, or a program of the row. It runs in a sandbox, where no
    expected value ever is, and verdicts are made outside.

    Args:
        sample: sample to score.
        cases: column with the cases. Left out: the first known one that the row has.
        score: `all`: 1 if all cases pass; `share`: the share that passes; `first_failure`: the
            share that passes before the first one that fails.
        stop: do not run what comes after the first case that fails; it counts as failed.
        compare: rule for standard outputs, or a mapping: `{kind: numbers, relative: 1.0e-4}`.
        language: of the programs; all but Python need their tools and the level `namespaces`, or
            hosts of SandboxFusion or Piston.
        limits: of each case.
        sandbox: where programs run.

    Parts: `compiled`, 1 if its text is a program; `passed`, `wrong`, `raised`, `timed_out`,
    `memory` and `crashed`, the share of the cases that ended so.

    Raises:
        DataError: the row has no cases, or none that can be read.
        SandboxError: the sandbox failed; never the program's doing.
    """
    problem = problem_of(sample, cases)
    if language != "python" and not _reads_input(problem):
        raise DataError(
            f"row {sample.prompt.id}: its cases call functions, which is judged in Python only; "
            f"programs in {language} need standard input and output, or a row's own program"
        )
    source = _program(sample, language)
    if source is None:
        return _reward(Judged([Verdict(Result.NOT_COMPILED)], 1), score)
    compiles_here = language != "python" and sandbox.level != "remote"
    judging = Judging(
        opened=await open_sandbox(sandbox, more=places_of(language) if compiles_here else ()),
        language=language,
        limits=limits.limits(),
        compare=compare if isinstance(compare, Comparison) else Comparison(kind=compare),
        stop=stop or score == "first_failure",
        for_pytest=lambda: open_pytest_sandbox(sandbox),
    )
    try:
        judged = await judging.judge(_completed(source, problem), problem)
    except ValueError as error:
        raise DataError(f"row {sample.prompt.id}: {error}") from None
    return _reward(judged, score)


def _program(sample: Sample, language: LanguageName) -> str | None:
    """Return the text of the program in a response; None if there is none, or it is too long."""
    final = final_text(sample.response_text, prompt=sample.prompt.text)
    source = program_of(final, language) if final is not None else None
    return None if source is None or len(source) > MOST_CHARS else source


def _reads_input(problem: Problem) -> bool:
    """Return whether a program of any language can be judged: by its input and output alone."""
    return isinstance(problem, Texts) or (isinstance(problem, Suite) and problem.style == "check")


def _completed(source: str, problem: Problem) -> str:
    """Return the program, with the row's `prelude` before it if it continues that text or may need
    its imports."""
    if not isinstance(problem, Suite) or not problem.prelude or "__future__" in source:
        return source
    name = re.escape((problem.entry or "").rpartition(".")[2])
    defined = re.search(rf"^\s*(?:async\s+)?(?:def|class)\s+{name}\b|^{name}\s*=", source, re.M)
    return f"{problem.prelude}\n{source}" if not defined or _whole(problem.prelude) else source


def _whole(text: str) -> bool:
    """Return whether a text of a row is Python as it is."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True


def _reward(judged: Judged, score: Score) -> Reward:
    """Return score and parts; `score`: see `code_reward`."""
    verdicts, of = judged.verdicts, judged.number
    kinds = Counter(each.kind for each in verdicts)
    compiled = not kinds[Result.NOT_COMPILED]
    parts = {"compiled": float(compiled)}
    parts |= {kind.value: kinds[kind] / of for kind in Result if kind is not Result.NOT_COMPILED}
    failed = [n for n, each in enumerate(verdicts) if not each.passed]
    first = failed[0] if failed else len(verdicts)
    scores: dict[str, float] = {
        "all": float(not failed and len(verdicts) == of),
        "share": parts["passed"],
        "first_failure": first / of,
    }
    return Reward(scores[score], parts)


def check_code(
    cases: str | None = None,
    language: LanguageName = "python",
    sandbox: SandboxSettings | None = None,
    **_: Any,
) -> None:
    """Raise ConfigError if the language has no tools here, or cannot run at the level."""
    if language == "python":
        return
    settings = sandbox or SandboxSettings()
    level = settings.level
    if settings.remote is not None:
        if settings.remote.protocol == "roll":
            raise ConfigError(
                "language: hosts of `roll sandbox serve` run Python only; programs in "
                f"{language} need the level `namespaces`, or hosts of SandboxFusion or Piston "
                "(sandbox.remote.protocol = sandbox_fusion or piston)"
            )
        return
    if level in ("landlock", "strict"):
        raise ConfigError(
            f"language: programs in {language} are processes of their own, with tools of this "
            f"machine, which only the level `namespaces` allows; found sandbox.level = {level} "
            "(or hosts of SandboxFusion or Piston, with `level: remote`)"
        )
    places_of(language)
