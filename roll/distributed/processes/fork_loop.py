"""The process of the fork server; `fork_server.py` starts it.

It imports modules, and then makes a fork for every client (`fork_client.py`). Before it forks, it
only imports modules and starts no threads.
"""

from __future__ import annotations

import array
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path

from roll.distributed.on_ray.environment import (
    WITHOUT_TRITON,
    WORKER_TOKEN,
    replace_environment,
)
from roll.distributed.processes import fork_client
from roll.distributed.processes.child_forks import FORKS_CHILDREN, start_child_server
from roll.platform.allocator import set_from

PR_SET_PDEATHSIG = 1
"""Option of `prctl`: the signal that this process gets when its parent ends."""
REQUEST_TIMEOUT_S = 10.0
"""Time limit for the request of a client, in seconds. A client that takes longer has been stopped
or killed."""
ACCEPT_AGAIN_S = 0.1
"""Pause after a client that could not be accepted, in seconds; it waits."""


@dataclass(frozen=True, slots=True)
class _ForkRequest:
    """Request of a client: the process that the fork is to become."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    oom: str
    """Content of the client's `oom_score_adj`."""


@dataclass(frozen=True, slots=True)
class _Fork:
    """A fork, which is a worker, and the connection to its client."""

    pid: int
    ended: int
    """File descriptor that becomes readable when the process has ended."""
    client: socket.socket


@dataclass
class _Server:
    """The loop of the server process."""

    listener: socket.socket
    forks: dict[int, _Fork] = field(default_factory=dict)
    """Forks by file descriptor: each is listed under `ended` and under that of `client`."""

    def serve(self) -> _ForkRequest:
        """Make a fork for every client. The method never returns in the server; in each fork, it
        returns the request of the client."""
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        while True:
            # One event at a time: handling it may close the descriptor of another event, and open a
            # new descriptor with the same number.
            descriptor, _ = poll.poll()[0]
            if descriptor != self.listener.fileno():
                self._settle(descriptor, self.forks[descriptor], poll)
            elif (wanted := self._accept(poll)) is not None:
                return wanted

    def _accept(self, poll: select.poll) -> _ForkRequest | None:
        """Make a fork for one client. Return the request in the fork, None in the server."""
        try:
            client, _ = self.listener.accept()
        except OSError:  # too many open files, or the client has gone
            time.sleep(ACCEPT_AGAIN_S)
            return None
        client.settimeout(REQUEST_TIMEOUT_S)
        streams: list[int] = []
        try:
            if not fork_client.is_ours(client):
                raise PermissionError("a client of another user")
            wanted = _receive(client, streams)
            pid = os.fork()
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
        ):  # also if there is no memory for a fork: the client then starts Python itself
            client.close()
            return None
        else:
            if not pid:
                self._leave(client, streams)
                return wanted
            try:
                ended = os.pidfd_open(pid)
            except OSError:  # too many open files: nobody could tell the client of the fork's end
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                client.close()
                return None
            self._watch(_Fork(pid, ended, client), poll)
            with suppress(OSError):
                client.sendall(fork_client.FORKED)
            return None
        finally:
            for stream in streams:
                os.close(stream)

    def _watch(self, fork: _Fork, poll: select.poll) -> None:
        """Let `serve` notice the end of a fork, and of its client."""
        for descriptor in (fork.ended, fork.client.fileno()):
            self.forks[descriptor] = fork
            poll.register(descriptor, select.POLLIN)

    def _leave(self, client: socket.socket, streams: Sequence[int]) -> None:
        """Close, in a fork, the server's descriptors, and take over the client's streams."""
        for fork in {id(fork): fork for fork in self.forks.values()}.values():
            os.close(fork.ended)
            fork.client.close()
        self.listener.close()
        client.close()
        for target, stream in enumerate(streams):
            os.dup2(stream, target)

    def _settle(self, descriptor: int, fork: _Fork, poll: select.poll) -> None:
        """Handle the end of a fork or of its client. If the fork has ended, send its status to the
        client; if the client has ended, kill the fork."""
        poll.unregister(descriptor)
        if descriptor != fork.ended:
            os.kill(fork.pid, signal.SIGKILL)  # no other process can have this id before `waitpid`
            del self.forks[descriptor]
            return
        _, status = os.waitpid(fork.pid, 0)
        with suppress(OSError):
            fork.client.sendall(fork_client.STATUS.pack(os.waitstatus_to_exitcode(status)))
        if self.forks.pop(fork.client.fileno(), None) is not None:
            poll.unregister(fork.client)
        del self.forks[fork.ended]
        fork.client.close()
        os.close(fork.ended)


def _receive(client: socket.socket, streams: list[int]) -> _ForkRequest:
    """Read and return the request of a client.

    Args:
        streams: receives the descriptors of the client's standard streams, even if reading fails.

    Raises:
        OSError: the client has ended, or is too slow.
        LookupError, TypeError, ValueError: the request is malformed.
    """
    room = socket.CMSG_LEN(3 * array.array("i").itemsize)
    head, rights, _, _ = client.recvmsg(fork_client.LENGTH.size, room)
    for _, _, data in rights:
        streams.extend(array.array("i", data))
    if len(head) < fork_client.LENGTH.size:
        raise ConnectionResetError("the client has gone")
    (size,) = fork_client.LENGTH.unpack(head)
    text = bytearray()
    while len(text) < size:
        piece = client.recv(size - len(text))
        if not piece:
            raise ConnectionResetError("the client has gone")
        text += piece
    found = json.loads(text)
    return _ForkRequest(found["argv"], found["env"], found["cwd"], found["oom"])


def _become(wanted: _ForkRequest) -> None:
    """Turn this fork into the requested Python process, with the modules already imported."""
    os.setpgid(0, 0)  # Ray kills the rest of a worker's process group at its end
    os.chdir(wanted.cwd)
    _mark(wanted.env)
    if WITHOUT_TRITON not in wanted.env:
        sys.modules.pop("triton", None)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python reseeds its own generator in a fork, numpy does not
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(wanted.env.get("OMP_NUM_THREADS", torch.get_num_threads())))
    set_from(wanted.env)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(wanted.oom)
    # Skip the options of Python: the server runs in the same interpreter, which has them already.
    argv = list(dropwhile(lambda word: word.startswith("-"), wanted.argv))
    script = argv[0]
    named = [folder for folder in wanted.env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = [str(Path(script).parent), *named, *sys.path[1:]]
    sys.argv[:] = argv
    if FORKS_CHILDREN in wanted.env:
        start_child_server(script, wanted.env.get("TMPDIR"))
    replace_environment(wanted.env)
    runpy.run_path(script, run_name="__main__")


def _mark(env: Mapping[str, str]) -> None:
    """Mark this fork, by the name of an open file, so that the reaper finds it. For a fork, /proc
    shows the environment with which the server was started, so the variables of the fork are no
    mark."""
    if token := env.get(WORKER_TOKEN):
        os.memfd_create(f"{WORKER_TOKEN}={token}")  # stays open until this process ends


def _main(stages: Sequence[tuple[int, Sequence[str]]]) -> None:
    """Import the modules of the first stage, then make forks until the server is killed; a further
    stage is a fork of this one that does the same.

    In a server this function never returns. In a fork for a client it runs the program that the
    client asked for.

    Args:
        stages: for each stage, file descriptor of the socket at which clients connect, and names
            of the modules; one that cannot be imported is left out.
    """
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # see `WITHOUT_TRITON`
    for listener, _ in stages:
        os.set_inheritable(listener, False)
    while True:
        (listener, modules), *further = stages
        for name in modules:
            with suppress(Exception):  # the worker that needs the module raises a better error
                importlib.import_module(name)
        if not further or not _is_fork():
            break
        os.close(listener)
        stages = further
    for other, _ in further:
        os.close(other)
    gc.collect()
    gc.freeze()  # otherwise garbage collection in a fork would copy all these pages
    _become(_Server(socket.socket(fileno=listener)).serve())


def _is_fork() -> bool:
    """Fork; return True in the fork, which is killed when this process ends."""
    server = os.getpid()
    if os.fork():
        return False
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it ended before the call
        os._exit(0)
    return True


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
