"""Calls of the code of parts that users bring: an error names the key of the part, and the user's
lines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from roll.config.errors import RollError
from roll.config.user_code.own import OwnPart
from roll.config.user_code.tracebacks import users_traceback

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class OwnCode:
    """A part that the user brought, and where the run file names it."""

    part: OwnPart
    key: str
    """Key of the part in the run file."""

    def call(self, act: Callable[P, R], about: str, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a method of the part.

        Args:
            act: the method.
            about: what it was called for, such as ` on samples of step 3`, for the message.

        Raises:
            RollError: the method raised an error.
        """
        with self._told(about):
            return act(*args, **kwargs)

    async def wait(self, answer: Awaitable[R], about: str) -> R:
        """Wait for what an `async` method of the part returns; see `call`. An error of the
        framework, such as a lost engine, passes as it is, and so does the end of the calling
        task; a CancelledError for any other reason is an error of the part."""
        try:
            with self._told(about):
                return await answer
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise RollError(
                f"{self.key}: {self.part.kind} raised CancelledError{about}: it awaited what was "
                f"cancelled; catch CancelledError there\n{users_traceback(error)}"
            ) from error

    def require(self, kept: bool, found: str, wanted: str) -> None:
        """Raise RollError, which says what the part returned and what is expected, unless the rule
        is kept."""
        if not kept:
            raise RollError(f"{self.key}: {self.part.kind} returned {found}; expected {wanted}")

    @contextmanager
    def _told(self, about: str) -> Iterator[None]:
        """Raise RollError, with key and traceback, in place of an error of the user's code."""
        try:
            yield
        except RollError:
            raise
        except Exception as error:
            raise RollError(
                f"{self.key}: {self.part.kind} raised an error{about}\n{users_traceback(error)}"
            ) from error
