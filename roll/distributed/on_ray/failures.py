"""Translation of Ray's exceptions into this framework's: a `RollError` of the same type, or a
`WorkerError`."""

from __future__ import annotations

import re
from typing import NoReturn

import ray

from roll.core.errors import RollError, WorkerError
from roll.distributed.on_ray.members import Member
from roll.distributed.watchdog import Watchdog

GRACE_S = 2.0
"""Time to wait for the report of a death before the error of a rank is raised, in seconds. A rank
often fails because another rank died ("connection closed by peer"); the death is then the better
message."""


def raise_failure(
    error: Exception, member: Member, method: str, watchdog: Watchdog, *, grace_s: float = GRACE_S
) -> NoReturn:
    """Raise this framework's error for a failed call.

    Args:
        error: exception that `ray.get` raised.
        member: the actor that was called.
        grace_s: time to wait for the report of a death, in seconds.

    Raises:
        RollError: the worker raised a RollError. It is raised again, with the name of the worker
            and the traceback as a note.
        WorkerLostError: the worker is dead; it is replaceable.
        WorkerError: in all other cases.
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
    """Return a message of Ray without its escape codes for terminal colors."""
    return re.sub(r"\x1b\[[0-9;]*m", "", colored)
