"""Forks in place of new interpreters for the processes that an engine starts in its worker.

vLLM starts its core as a new Python process, which imports torch and vLLM again: 8 to 10 s of a
core. A worker cannot fork the core itself, because it has threads since it connected to Ray. So a
worker that is a fork of the run's fork server first starts a server of its own, while it has one
thread and all imports of the fork server. It is the server of the start method `forkserver` of
`multiprocessing`; `forked_children` gives the context that uses it.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import context, forkserver
from pathlib import Path
from typing import Any

from roll.distributed.on_ray.environment import replace_environment

FORKS_CHILDREN = "ROLL_FORKS_CHILDREN"
"""Variable of a worker that is to start a server for its children."""

_LONGEST = 107 - len("/roll-forks-12345678/socket")
"""Length of the longest folder that leaves room for the name of the socket, in bytes."""


@dataclass(frozen=True, slots=True)
class ChildServer:
    """The server, as the worker knows it."""

    pid: int
    address: Path
    """Socket file in a folder of its own, which other users cannot enter."""
    alive: int
    """Pipe that nobody writes to. The server ends when all who hold it have ended: the worker and
    the forks."""
    lasts: bool = False
    """Whether further engines will use it: then neither it nor its socket ends with the first."""


_server: ChildServer | None = None
"""The server of this process that `forked_children` has not used yet."""
_used: list[ChildServer] = []
"""Servers of this process that are in use."""


def start_child_server(script: str, temporary: str | None = None) -> None:
    """Start the server as a fork of this process, which must have no thread but this one, and still
    the environment variables with which its program was started.

    Args:
        script: program that this process is about to run. Forks do not run it again, as
            `multiprocessing` otherwise does for the sake of what it defines.
        temporary: folder for temporary files of the worker, whose environment variables this
            process does not have yet. `/tmp` stands in if there is none, and if its path is too
            long: the name of a socket has room for 107 bytes.
    """
    if sys.version_info >= (3, 14):  # there the server asks for a key that is made elsewhere
        return
    usable = temporary and os.path.isdir(temporary) and len(os.fsencode(temporary)) <= _LONGEST
    folder = temporary if usable else "/tmp"
    address = Path(tempfile.mkdtemp(prefix="roll-forks-", dir=folder)) / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        ended, alive = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(alive)
            sys.modules["__main__"].__file__ = os.path.normpath(script)
            _find_title()
            with suppress(BaseException):
                forkserver.main(listener.fileno(), ended, [])
            shutil.rmtree(address.parent, ignore_errors=True)  # the worker may have ended first
            os._exit(0)
        os.close(ended)
    give_child_server(ChildServer(pid, address, alive))


def give_child_server(server: ChildServer) -> None:
    """Let the next block of `forked_children` use this server."""
    global _server
    _server = server


def _find_title() -> None:
    """Let the forks of this process set their title with setproctitle.

    The first call of the package looks for the memory of the title just before the environment
    variables, and moves these. So it must come before they are replaced, and not in the worker:
    Ray has a copy of the package, which then would not find the memory.
    """
    if setproctitle := sys.modules.get("setproctitle"):
        setproctitle.getproctitle()


@contextmanager
def forked_children() -> Iterator[context.BaseContext | None]:
    """Give a context of `multiprocessing` whose processes are forks of the server, for the time of
    the block; None if this process has no server. Only the first block can use it."""
    global _server
    server, _server = _server, None
    if server is None:
        yield None
        return
    if not server.lasts:
        _used.append(server)
    ours = forkserver._forkserver
    before = dict(vars(ours))
    vars(ours).update(
        _forkserver_address=str(server.address),
        _forkserver_alive_fd=server.alive,
        _forkserver_pid=server.pid,
    )
    try:
        yield _ForkedContext()
    finally:
        vars(ours).update(before)
        if not server.lasts:
            shutil.rmtree(server.address.parent, ignore_errors=True)


def servers_in_use() -> list[int]:
    """Return the process ids of the servers that have been used and do not last. Without its
    server, a process counts as ended for `multiprocessing`."""
    return [server.pid for server in _used]


class _Forked(context.ForkServerProcess):
    """Process with the environment variables and standard streams that this process has when it is
    started; the server has those of the time before the worker began."""

    def __init__(self, *, target: Callable[..., object], **options: Any) -> None:
        super().__init__(target=_Target(target), **options)


class _ForkedContext(context.ForkServerContext):
    """Context of `multiprocessing` for `_Forked` processes."""

    Process = _Forked


class _Target:
    """Function that a fork runs. It is pickled at the start of the fork, together with the
    environment variables at that time; when it is unpickled, the fork takes over these variables
    and the standard streams of the process that started it."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __getstate__(self) -> dict[str, Any]:
        return {"function": self._function, "environ": dict(os.environ), "starter": os.getpid()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._function = state["function"]
        replace_environment(state["environ"])
        for stream in (1, 2):
            with suppress(OSError):  # a stream that cannot be opened anew: keep the server's
                opened = os.open(f"/proc/{state['starter']}/fd/{stream}", os.O_WRONLY | os.O_APPEND)
                os.dup2(opened, stream)
                os.close(opened)
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))

    def __call__(self, *args: Any, **options: Any) -> None:
        self._function(*args, **options)
