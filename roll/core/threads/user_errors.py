"""Errors that code of users raises: passed on by threads and event loops, and described."""

from __future__ import annotations

import asyncio

SHOWN_CHARS = 4000
"""Longest part of an error that is told: some have a whole file in their text."""


class UserCodeError(Exception):
    """Error: code of a user raised what no future and no event loop passes on. The message is its
    type and text, and the error itself is the cause."""


def passable(error: BaseException) -> BaseException:
    """Return what to raise for an error that code of a user has raised, where a coroutine waits.

    A future does not take StopIteration, which `next` raises at the end of a list: who waits for
    the future would wait for ever. SystemExit and KeyboardInterrupt end the event loop that they
    reach. Any other error that is no Exception, such as a panic of a library in Rust, passes by
    every `except Exception`. CancelledError stays: the caller has to tell whose it is.
    """
    ordinary = isinstance(error, Exception) and not isinstance(error, StopIteration)
    if ordinary or isinstance(error, asyncio.CancelledError):
        return error
    told = UserCodeError(described(error))
    told.__cause__ = error
    return told


def described(error: BaseException) -> str:
    """Return type and text of an error as `TypeError: text`, without the middle of a long text."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  # `__str__` may be the user's
        text = "its text cannot be made"
    if len(text) > SHOWN_CHARS:
        half = SHOWN_CHARS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return text if isinstance(error, UserCodeError) else f"{type(error).__name__}: {text}"
