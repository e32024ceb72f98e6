"""The `math` reward, which checks whether the final answer is equivalent to the ground truth.

Text and plain numbers are compared in this process, in microseconds. All other answers are checked
by math-verify in child processes with limits on CPU time and memory. An answer such as 9^9^9^9
counts as wrong and shows as the part `timeout`, but never hangs or crashes the run. If no child is
free in time, the reward fails on the sample with an error.
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
"""Largest length of an answer that is checked, in characters; a longer answer is wrong, unless the
ground truth is at least as long."""
MEMORY_BYTES = 2**30
"""Limit on the address space that a child may add after its start, in bytes."""
MAX_PROCESSES = 4
"""Largest number of child processes."""
CHECK_CPU_S = 2.0
"""Limit on the CPU time of one check, in seconds. With CPU time the same answer gets the same
verdict on a busy machine."""
CHECK_PATIENCE_S = 30.0
"""Limit on the wall-clock time of one check, in seconds; after it the sample has no verdict. A
check that takes longer than `timeout_s` of the reward occupies a thread as a hung call;
`MAX_PROCESSES` is below the number of hung calls that is allowed."""
QUEUE_TIMEOUT_S = 5.0
"""Longest wait for a free child, in seconds. It is less than the default `timeout_s`, so that the
wait ends before its thread counts as hung."""


def math_reward(sample: Sample) -> Reward:
    """Return a reward of 1 if the answer is right, else 0.

    Text and plain numbers are compared in this process, other answers in a child process. An answer
    need not be boxed to be right.

    Parts: `right`, the same value; `formatted`, 1 if the answer was boxed; `timeout`, 1 if the
    check ran out of time or memory, in which case the answer counts as wrong.

    Raises:
        TimeoutError: no child process was free, or the child got too little CPU time. This counts
            as a failure of the reward and not as a wrong answer.
    """
    return judge(sample, _equivalent)


def judge(sample: Sample, equivalent: Callable[[str, str], bool | None]) -> Reward:
    """Return the result of `math_reward`, with `equivalent` as the check by algebra.

    Args:
        sample: sample to score.
        equivalent: function of truth and answer, called if they cannot be compared as text or plain
            numbers. It returns None if the check ran out of time or memory.
    """
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
    """Wait until the first child has started (seconds), so that the first sample does not wait.

    Raises:
        TimeoutError: it has not started in time.
    """
    _checkers().warm_up()


class NoVerdictError(Exception):
    """Error: a check ran out of CPU time or memory."""


class CachedChecks:
    """Cache of verdicts by pair of truth and answer, because siblings often give the same answer.

    Only verdicts are kept: a check that ran out of time or memory is repeated at the next call.
    """

    def __init__(self, ask: Callable[[str, str], bool]) -> None:
        self._ask = functools.lru_cache(maxsize=4096)(ask)

    def __call__(self, truth: str, answer: str) -> bool | None:
        """Return whether the answer is right; None if the check ran out of CPU time or memory."""
        try:
            return self._ask(truth, answer)
        except NoVerdictError as error:
            log.warning("math: no verdict on %r against %r: %s", answer[:80], truth[:80], error)
            return None


def _ask(truth: str, answer: str) -> bool:
    """Return the verdict of a child process; False if math-verify cannot read the answer.

    Raises:
        NoVerdictError: the check ran out of CPU time or memory.
        NoChildFreeError: no child was free in time, or the child got too little CPU time.
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
        # math-verify raises on text that it cannot read. Memory and recursion limits end here, too.
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
    """Return the one pool of child processes of this process; the children end with the process."""
    cores = len(os.sched_getaffinity(0))
    spec = ChildSpec(
        "roll.rewards.math.equivalence:make_checker", (), MEMORY_BYTES, fork=True, clock="cpu"
    )
    return ChildPool(spec, min(MAX_PROCESSES, cores))
