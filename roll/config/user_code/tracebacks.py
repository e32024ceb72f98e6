"""Readable tracebacks of users' code, which begin with the user's own code."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import sysconfig
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException

import pydantic

import roll

MAX_FRAMES = 12
"""Largest number of frames in a traceback; of more frames only the first and last are shown."""

_OTHERS = tuple(
    f"{Path(str(package.__file__)).parent}/" for package in (roll, asyncio, concurrent.futures)
)
_NEVER_SHOWN = (
    "<frozen importlib",
    *(f"{Path(str(package.__file__)).parent}/" for package in (importlib, pydantic)),
)
_INSTALLED = tuple(f"{sysconfig.get_path(key)}/" for key in ("stdlib", "purelib", "platlib"))
"""Folders of the standard library and of installed packages."""


def users_traceback(error: BaseException) -> str:
    """Return the traceback of an error and of its causes, from the first frame of user code on.

    The frames of the framework before that frame are left out, and all frames of the import system
    and of pydantic. If there is no frame of user code, only the last frame is shown; of a
    SyntaxError none, because it names file and line itself.
    """
    told = TracebackException.from_exception(error, compact=True)
    link: TracebackException | None = told
    while link is not None:
        link.stack = StackSummary.from_list(_from_users_first(list(link.stack)))
        link = link.__cause__ or link.__context__
    if isinstance(error, SyntaxError) and all(_is_ours(frame) for frame in told.stack):
        told.stack = StackSummary()
    return "".join(told.format()).rstrip()


def users_place(error: BaseException) -> str | None:
    """Return file and line of the last frame of user code in a traceback, `/folder/my.py:3`: the
    line that called an installed package if that one failed. None if there is no such frame."""
    frames = TracebackException.from_exception(error).stack
    others = [frame for frame in frames if not _is_ours(frame)]
    own = [frame for frame in others if not frame.filename.startswith(_INSTALLED)]
    last = (own or others)[-1:]
    return f"{last[0].filename}:{last[0].lineno}" if last else None


def _is_ours(frame: FrameSummary) -> bool:
    """Return whether a frame is of the framework or of what runs it."""
    return frame.filename.startswith(_OTHERS + _NEVER_SHOWN)


def _from_users_first(frames: list[FrameSummary]) -> list[FrameSummary]:
    """Drop the frames before the first frame of user code; keep at most `MAX_FRAMES` of the rest.

    Of more frames, the first half and the last half of that number are kept. Without user code,
    only the last frame is kept.
    """
    frames = [f for f in frames if not f.filename.startswith(_NEVER_SHOWN)] or frames[-1:]
    first = next((i for i, frame in enumerate(frames) if not _is_ours(frame)), None)
    shown = frames[-1:] if first is None else frames[first:]
    half = MAX_FRAMES // 2
    return shown if len(shown) <= MAX_FRAMES else [*shown[:half], *shown[-half:]]
