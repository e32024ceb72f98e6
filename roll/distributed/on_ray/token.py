"""The token of a Ray cluster: only processes that know it can give commands to Ray.

If a run starts Ray, it makes a new secret token and puts it into the driver's environment
variables, which all processes of Ray inherit. A Ray cluster that a run joins was started by
somebody else, with a token or without one.
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
"""Environment variables that Ray reads in every process: mode, token, path of the token file."""

HOW_TO_USE_A_TOKEN = (
    "`ray get-auth-token --generate` writes a token to ~/.ray/auth_token; copy that file, readable "
    "for you alone, to every node and to where the run is started, and start Ray there with "
    "RAY_AUTH_MODE=token"
)


@contextmanager
def own_token() -> Iterator[None]:
    """Set a new token for a Ray that is started inside the block. After the block, restore the old
    variables.

    A token that the user has set for other clusters is not used: only the run and its workers need
    access to this Ray.
    """
    with _variables({MODE: "token", TOKEN: secrets.token_hex(32), TOKEN_FILE: None}):
        yield


@contextmanager
def use_token_of_cluster() -> Iterator[bool]:
    """Let Ray use the token that `found_token` finds, for the time of the block. Yield whether Ray
    shows a token to the cluster.

    By itself, Ray looks for a token only if RAY_AUTH_MODE is set or no address is given, although
    `ray start` always reads the same file.
    """
    mode = os.environ.get(MODE) or ("token" if found_token() else None)
    with _variables({MODE: mode}):
        yield mode is not None and mode.lower() == "token"


@contextmanager
def _variables(wanted: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables as `environment` does; let Ray read its token again before and after."""
    with ExitStack() as undo:
        undo.callback(_read_again)
        undo.enter_context(environment(wanted))
        _read_again()
        yield


def names_a_token(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, says that authentication failed. Ray wraps the
    original error in others, one of which contains it only as text."""
    while error is not None:
        if "authentication" in f"{type(error).__name__} {error}".lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def found_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return where Ray finds the token of a cluster: the name of a variable, or the path of a file.
    Return None if there is no token."""
    if environ.get(TOKEN):
        return TOKEN
    named = environ.get(TOKEN_FILE)
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    return str(path) if path.is_file() else None


def _read_again() -> None:
    """Make Ray read mode and token again; it keeps those from its import. The mode comes first: a
    thread of a Ray that is ending may ask for the token once more, and aborts the process if the
    mode requires a token and there is none."""
    core: Any = importlib.import_module("ray._raylet")
    core.Config.initialize("")
    core.AuthenticationTokenLoader.instance().reset_cache()
