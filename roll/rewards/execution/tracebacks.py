"""Tracebacks of rewards for people: they begin where the user's own code does."""

from __future__ import annotations

import asyncio
import concurrent.futures
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException

import roll

MAX_FRAMES = 12
"""Of a longer one, the first and the last frames are shown."""

_OTHERS = tuple(
    f"{Path(str(package.__file__)).parent}/" for package in (roll, asyncio, concurrent.futures)
)


def users_traceback(error: BaseException) -> str:
    """Return the traceback of an error, and of its causes, without the framework's frames above the
    user's first one; without any frame of the user's, the framework's last."""
    told = TracebackException.from_exception(error, compact=True)
    link: TracebackException | None = told
    while link is not None:
        link.stack = StackSummary.from_list(_from_users_first(list(link.stack)))
        link = link.__cause__ or link.__context__
    return "".join(told.format()).rstrip()


def _from_users_first(frames: list[FrameSummary]) -> list[FrameSummary]:
    first = next((i for i, f in enumerate(frames) if not f.filename.startswith(_OTHERS)), None)
    shown = frames[-1:] if first is None else frames[first:]
    half = MAX_FRAMES // 2
    return shown if len(shown) <= MAX_FRAMES else [*shown[:half], *shown[-half:]]
