"""From Ray's exceptions to this framework's: the same `RollError` type, or a `WorkerError`."""

from __future__ import annotations

import re
from typing import NoReturn

import ray

from roll.core.errors import RollError, WorkerError
from roll.distributed.on_ray.members import Member
from roll.distributed.watchdog import Watchdog

GRACE_S = 2.0
"""A rank often fails because a sibling died ("connection closed by peer"); how long to wait for the
news of that death, which is the better message."""


def raise_failure(
    error: Exception, member: Member, method: str, watchdog: Watchdog, *, grace_s: float = GRACE_S
) -> NoReturn:
    """Raise what a failed call means to the user.

    Args:
        error: what `ray.get` raised.
        member: who was called.
        grace_s: how long to wait for the news of a death.

    Raises:
        RollError: the worker raised one; the same type, noted with the worker's name.
        WorkerLostError: the worker is gone, and can be replaced.
        WorkerError: anything else.
    """
    what = f"{member.name}.{method}"
    if isinstance(error, ray.exceptions.RayTaskError):
        cause, trace = error.cause, plain_text(str(error))
        if isinstance(cause, RollError):
            cause.add_note(f"raised by {what}\n{trace}")
            raise cause from None
        watchdog.check([member], grace_s=grace_s)
        raise WorkerError(f"{what} raised {type(cause).__name__}: {cause}\n{trace}") from None
    watchdog.check([member], grace_s=grace_s)
    message = f"{what} failed: {error}"
    if isinstance(error, ray.exceptions.RayActorError):
        raise member.error(message) from None
    raise WorkerError(message) from None


def plain_text(colored: str) -> str:
    """Without the terminal colors that Ray writes into its messages."""
    return re.sub(r"\x1b\[[0-9;]*m", "", colored)
