"""Readable tracebacks of users' code, which begin with the user's own code."""

from __future__ import annotations

import asyncio
import concurrent.futures
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException

import roll

MAX_FRAMES = 12
"""Largest number of frames in a traceback; of more frames only the first and last are shown."""

_OTHERS = tuple(
    f"{Path(str(package.__file__)).parent}/" for package in (roll, asyncio, concurrent.futures)
)


def users_traceback(error: BaseException) -> str:
    """Return the traceback of an error and of its causes, from the first frame of user code on.

    The frames of the framework before that frame are left out. If there is no frame of user code,
    only the last frame is shown.
    """
    told = TracebackException.from_exception(error, compact=True)
    link: TracebackException | None = told
    while link is not None:
        link.stack = StackSummary.from_list(_from_users_first(list(link.stack)))
        link = link.__cause__ or link.__context__
    return "".join(told.format()).rstrip()


def _from_users_first(frames: list[FrameSummary]) -> list[FrameSummary]:
    """Drop the frames before the first frame of user code; keep at most `MAX_FRAMES` of the rest.

    Of more frames, the first half and the last half of that number are kept. Without user code,
    only the last frame is kept.
    """
    first = next((i for i, f in enumerate(frames) if not f.filename.startswith(_OTHERS)), None)
    shown = frames[-1:] if first is None else frames[first:]
    half = MAX_FRAMES // 2
    return shown if len(shown) <= MAX_FRAMES else [*shown[:half], *shown[-half:]]
