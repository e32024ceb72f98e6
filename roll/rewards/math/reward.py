"""The `math` reward: is the final answer equivalent to the ground truth?

Text and plain numbers are compared here, in microseconds. The rest goes through math-verify in
child processes with a limit on CPU time and memory: an answer such as 9^9^9^9 then costs its sample
a verdict of "wrong" (and shows up as the part `timeout`), and never hangs or crashes the run. A
sample for which no child is free fails visibly.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable

from roll.core.types import Sample
from roll.rewards.api import Reward
from roll.rewards.execution.child import ChildDiedError, ChildRaisedError, ChildSpec
from roll.rewards.execution.child_pool import ChildPool, NoChildFreeError
from roll.rewards.math.final_answer import find_answer, find_truth
from roll.rewards.math.plain_equivalence import plainly_equal

log = logging.getLogger(__name__)

MAX_ANSWER_CHARS = 2000
"""A longer answer is wrong without a look, unless the ground truth is as long."""
MEMORY_BYTES = 2**30
MAX_PROCESSES = 4
CHECK_CPU_S = 2.0
"""CPU time for one check: however busy the machine, the same answer gets the same verdict."""
CHECK_PATIENCE_S = 30.0
"""For one check by the wall clock; beyond it the sample has no verdict. A check that is waited for
longer than `timeout_s` holds a thread; `MAX_PROCESSES` stays below the number of those that may."""
QUEUE_TIMEOUT_S = 5.0
"""Below the default `timeout_s`, so that who waits for a child holds no thread any longer."""


def math_reward(sample: Sample) -> Reward:
    """1 where the answer is right, else 0.

    Parts: `right`; `formatted`, 1 where the answer was boxed; `timeout`, 1 where the check of an
    answer ran out of time or memory, which counts as wrong.

    Raises:
        TimeoutError: all checkers were busy. That says nothing about the answer, so it counts as a
            failure of the reward and not as a wrong answer.
    """
    return judge(sample, _equivalent)


def judge(sample: Sample, equivalent: Callable[[str, str], bool | None]) -> Reward:
    """The verdict of `math_reward`; `equivalent(truth, answer)` decides where text and plain
    numbers do not, with None for a check that ran out of time or memory."""
    found = find_answer(sample.response_text, prompt=sample.prompt.text, truncated=sample.truncated)
    truth = find_truth(sample.answer)
    right, timed_out = False, False
    if found.text is not None and truth:
        too_long = len(found.text) > max(MAX_ANSWER_CHARS, len(truth))
        verdict = False if too_long else plainly_equal(truth, found.text)
        if verdict is None:
            verdict = equivalent(truth, found.text)
            timed_out = verdict is None
        right = bool(verdict)
    return Reward(
        score=float(right),
        parts={
            "right": float(right),
            "formatted": float(found.boxed),
            "timeout": float(timed_out),
        },
    )


def start_checkers() -> None:
    """Wait for the first child (seconds), so that the first sample need not."""
    _checkers().warm_up()


class NoVerdictError(Exception):
    """A check ran out of CPU time or memory."""


class CachedChecks:
    """Verdicts by pair, since siblings often give the same answer. Only what was found out about
    the answer is kept: a check that gave no verdict is asked again."""

    def __init__(self, ask: Callable[[str, str], bool]) -> None:
        self._ask = functools.lru_cache(maxsize=4096)(ask)

    def __call__(self, truth: str, answer: str) -> bool | None:
        """Return the verdict; None where the check ran out of CPU time or memory."""
        try:
            return self._ask(truth, answer)
        except NoVerdictError as error:
            log.warning("math: no verdict on %r against %r: %s", answer[:80], truth[:80], error)
            return None


def _ask(truth: str, answer: str) -> bool:
    """The verdict of a child.

    Raises:
        NoVerdictError: it ran out of CPU time or memory.
        NoChildFreeError: no child had the time; says nothing about the answer.
    """
    try:
        verdict = _checkers().call(
            (truth, answer),
            CHECK_CPU_S,
            queue_timeout_s=QUEUE_TIMEOUT_S,
            patience_s=CHECK_PATIENCE_S,
        )
    except NoChildFreeError:
        raise
    except (TimeoutError, ChildDiedError) as error:
        raise NoVerdictError(str(error)) from error
    except ChildRaisedError as error:
        # math-verify gives up on what it cannot read; memory and recursion limits end here too.
        reason = str(error).rstrip().rpartition("\n")[2]
        if reason.startswith(("MemoryError", "RecursionError")):
            raise NoVerdictError(reason) from error
        log.warning("math: %r against %r: %s", answer[:80], truth[:80], reason)
        return False
    assert isinstance(verdict, bool)
    return verdict


_equivalent = CachedChecks(_ask)


@functools.cache
def _checkers() -> ChildPool:
    """One pool for this process; its children end with it."""
    cores = len(os.sched_getaffinity(0))
    spec = ChildSpec(
        "roll.rewards.math.equivalence:make_checker", (), MEMORY_BYTES, fork=True, clock="cpu"
    )
    return ChildPool(spec, min(MAX_PROCESSES, cores))
