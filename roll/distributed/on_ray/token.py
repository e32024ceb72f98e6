"""Who may give commands to Ray: those who know its token.

A Ray of a run's own gets a token that nobody else has seen, in the environment of the driver, which
everything that Ray starts inherits. A Ray that is joined was started by somebody else, with a token
or without one.
"""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from roll.distributed.on_ray.environment import environment

MODE, TOKEN, TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""What Ray reads, in every process."""

HOW_TO_USE_A_TOKEN = (
    "`ray get-auth-token --generate` writes a token to ~/.ray/auth_token; copy that file, readable "
    "for you alone, to every node and to where the run is started, and start Ray there with "
    "RAY_AUTH_MODE=token"
)


@contextmanager
def own_token() -> Iterator[None]:
    """A fresh token for the Ray that is started inside; afterwards what was there before.

    What the user has set for other clusters is not looked at: nobody but the run and its workers
    has business with this Ray.
    """
    with _variables({MODE: "token", TOKEN: secrets.token_hex(32), TOKEN_FILE: None}):
        yield


@contextmanager
def use_token_of_cluster() -> Iterator[bool]:
    """While a Ray is joined, show it the token that `found_token` finds; whether one is shown.

    Ray itself looks for one only where RAY_AUTH_MODE or no address is given, although
    `ray start` takes the same file without being asked.
    """
    mode = os.environ.get(MODE) or ("token" if found_token() else None)
    with _variables({MODE: mode}):
        yield mode is not None and mode.lower() == "token"


@contextmanager
def _variables(wanted: Mapping[str, str | None]) -> Iterator[None]:
    with ExitStack() as undo:
        undo.callback(_read_again)
        undo.enter_context(environment(wanted))
        _read_again()
        yield


def names_a_token(error: BaseException | None) -> bool:
    """Whether Ray could not be joined for want of its token; Ray wraps that in other errors, one of
    which holds it as text only."""
    while error is not None:
        if "authentication" in f"{type(error).__name__} {error}".lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def found_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """Where Ray would take the token of a cluster from: a variable, or the path of a file."""
    if environ.get(TOKEN):
        return TOKEN
    named = environ.get(TOKEN_FILE)
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    return str(path) if path.is_file() else None


def _read_again() -> None:
    """Ray keeps mode and token of when it was imported. The mode comes first: a thread of a Ray
    that is ending may ask for the token once more, and aborts where it must have one and finds
    none."""
    core: Any = importlib.import_module("ray._raylet")
    core.Config.initialize("")
    core.AuthenticationTokenLoader.instance().reset_cache()
