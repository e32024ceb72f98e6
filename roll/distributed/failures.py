"""From Ray's exceptions to this framework's: the same `RollError` type, or a `WorkerError`."""

from __future__ import annotations

import re
from typing import NoReturn

import ray

from roll.core.errors import RollError, WorkerError
from roll.distributed.watchdog import Watchdog

GRACE_S = 2.0
"""A rank often fails because a sibling died ("connection closed by peer"); how long to wait for the
news of that death, which is the better message."""


def raise_failure(error: Exception, worker: str, method: str, watchdog: Watchdog) -> NoReturn:
    """Raise what a failed call means to the user.

    Args:
        error: what `ray.get` raised.
        worker: role and rank, like `actor_train[0]`.

    Raises:
        RollError: the worker raised one; the same type, noted with the worker's name.
        WorkerError: anything else.
    """
    if isinstance(error, ray.exceptions.RayTaskError):
        cause, trace = error.cause, plain_text(str(error))
        if isinstance(cause, RollError):
            cause.add_note(f"raised by {worker}.{method}\n{trace}")
            raise cause from None
        watchdog.check(grace_s=GRACE_S)
        raise WorkerError(
            f"{worker}.{method} raised {type(cause).__name__}: {cause}\n{trace}"
        ) from None
    watchdog.check(grace_s=GRACE_S)
    raise WorkerError(f"{worker}.{method} failed: {error}") from None


def plain_text(colored: str) -> str:
    """Without the terminal colors that Ray writes into its messages."""
    return re.sub(r"\x1b\[[0-9;]*m", "", colored)
